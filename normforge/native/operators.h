// What PyTorch calls of native.cpp: the autograd node of `rms_norm`, kernels of the operators, which
// compiled code calls, and one of PyTorch's own backward for `install()`.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include "native.h"

namespace NORMFORGE_NAMESPACE {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// ---- The autograd node --------------------------------------------------------------------------

struct Reference {  // owns a Python object; hold the GIL
    PyObject* object;
    explicit Reference(PyObject* taken) : object(taken) {
        if (!object) {
            python_error error;
            error.persist();
            throw std::move(error);
        }
    }
    Reference(const Reference&) = delete;
    ~Reference() { Py_DECREF(object); }
};

struct WithoutGil {  // where this thread has it
    std::optional<pybind11::gil_scoped_release> released;
    WithoutGil() {
        if (PyGILState_Check()) released.emplace();
    }
};

// The two results of a Python function; a result of None is undefined.
Results call(PyObject* function, PyObject* const* arguments, size_t count) {
    const Reference answer(PyObject_Vectorcall(function, arguments, count, nullptr));
    TORCH_CHECK_TYPE(PyTuple_Check(answer.object) && PyTuple_GET_SIZE(answer.object) == 2,
                     "two results were expected");
    Results results(2);
    for (size_t i = 0; i < 2; ++i) {
        PyObject* item = PyTuple_GET_ITEM(answer.object, i);
        TORCH_CHECK_TYPE(Py_IsNone(item) || THPVariable_Check(item), "a result must be a tensor");
        if (!Py_IsNone(item)) results[i] = THPVariable_Unpack(item);
    }
    return results;
}

template <size_t count>
Results call(PyObject* function, const Reference (&given)[count]) {
    PyObject* arguments[count];
    for (size_t i = 0; i < count; ++i) arguments[i] = given[i].object;
    return call(function, arguments, count);
}

double number(PyObject* object) {
    const double number = PyFloat_AsDouble(object);
    if (PyErr_Occurred()) Reference{nullptr};
    return number;
}

std::optional<double> number_or_none(PyObject* object) {
    return Py_IsNone(object) ? std::nullopt : std::optional(number(object));
}

Results forward_without_gil(Store& store, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor* residual, std::optional<double> eps, double offset) {
    const WithoutGil others_may_run;
    return serve_forward(store, x, weight, residual, eps, offset);
}

Results backward_without_gil(Store& store, const at::Tensor& dy, const at::Tensor& x,
                             const at::Tensor& rstd, const at::Tensor& weight) {
    const WithoutGil others_may_run;
    return serve_backward(store, dy, x, rstd, weight);
}

// Whether somebody may ask the results of a backward for their gradient, which Python refuses.
bool may_be_differentiated(const at::Tensor& dy, const at::Tensor& x) {
    return at::GradMode::is_enabled() && (dy.requires_grad() || x.requires_grad());
}

struct Norm : torch::autograd::Function<Norm> {
    // arguments: the Python objects of x, weight, eps and offset
    static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                              const std::optional<at::Tensor>& weight, Store* store,
                              PyObject* const* arguments) {
        const auto eps = number_or_none(arguments[2]);
        const double offset = number(arguments[3]);
        const auto scale = weight.value_or(at::Tensor());
        auto results = forward_without_gil(*store, x, scale, nullptr, eps, offset);
        if (results.empty()) results = call(store->forward, arguments, 4);
        ctx->save_for_backward({x, scale, results[1]});
        ctx->set_materialize_grads(false);
        ctx->saved_data["store"] = reinterpret_cast<int64_t>(store);
        ctx->saved_data["offset"] = offset;
        if (eps) ctx->saved_data["eps"] = *eps;
        return results[0];
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
        if (!gradients[0].defined()) return {{}, {}, {}, {}};
        const auto saved = ctx->get_saved_variables();
        const auto &dy = gradients[0], &x = saved[0], &weight = saved[1], &rstd = saved[2];
        auto& store = *reinterpret_cast<Store*>(ctx->saved_data.at("store").toInt());
        const double offset = ctx->saved_data.at("offset").toDouble();
        const bool need_dx = ctx->needs_input_grad(0);
        const bool need_dw = weight.defined() && ctx->needs_input_grad(1);
        const auto eps = ctx->saved_data.find("eps");
        const bool none = eps == ctx->saved_data.end();
        const bool usual = none || eps->second.toDouble() >= NORMFORGE_SMALLEST_EPS;
        if (need_dx && need_dw && offset == 0 && usual && !at::GradMode::is_enabled()) {
            const auto results = backward_without_gil(store, dy, x, rstd, weight);
            if (!results.empty()) return {results[0], results[1], {}, {}};
        }

        const pybind11::gil_scoped_acquire gil;
        const Reference given[] = {
            Reference(THPVariable_Wrap(dy)),
            Reference(THPVariable_Wrap(x)),
            Reference(THPVariable_Wrap(weight)),
            Reference(THPVariable_Wrap(rstd)),
            Reference(none ? Py_NewRef(Py_None) : PyFloat_FromDouble(eps->second.toDouble())),
            Reference(PyFloat_FromDouble(offset)),
            Reference(PyBool_FromLong(need_dx)),
            Reference(PyBool_FromLong(need_dw))};
        const auto results = call(store.gradients, given);
        return {results[0], results[1], {}, {}};
    }
};

// ---- The operators ------------------------------------------------------------------------------
// Kernels for autograd's key of the device, where every call of an operator arrives. They come
// before those in Python, which take all that is not a plain call with a plan. Packages share the
// operators: each has a kernel before those of the packages that came earlier, and serves the calls
// that ask for it, by the last argument.

using Values = c10::ArrayRef<c10::IValue>;

// dy, x, rstd, weight, dresidual, dw_dtype, weight_offset, need_dx, need_dw, package
Results serve_backward_operator(Store& store, Values given) {
    if (!given[3].isTensor() || !given[4].isNone() || !given[5].isNone()) return {};
    if (given[6].toDouble() != 0 || !given[7].toBool() || !given[8].toBool()) return {};
    auto results = backward_without_gil(store, given[0].toTensor(), given[1].toTensor(),
                                        given[2].toTensor(), given[3].toTensor());
    if (!results.empty())
        results.push_back(allocate({0}, {1}, results[0], results[0].scalar_type()));
    return results;
}

// x, residual if there is one, weight, eps, weight_offset, package
Results serve_norm_operator(Store& store, Values given) {
    const auto* residual = given.size() == 6 ? &given[1].toTensor() : nullptr;
    const auto rest = given.slice(given.size() - 4);
    if (!rest[0].isTensor()) return {};
    return forward_without_gil(store, given[0].toTensor(), rest[0].toTensor(), residual,
                               rest[1].toOptional<double>(), rest[2].toDouble());
}

using Serve = Results (*)(Store&, Values);
constexpr std::pair<const char*, Serve> OPERATORS[] = {
    {"rms_norm_backward", serve_backward_operator},
    {"rms_norm", serve_norm_operator},
    {"add_rms_norm", serve_norm_operator}};

struct Operator : c10::OperatorKernel {
    Store& store;
    const Serve serve;
    const std::string package;
    const c10::SafeKernelFunction other;  // of another package, or in Python
    Operator(Store& store, Serve serve, std::string package, c10::SafeKernelFunction other)
        : store(store), serve(serve), package(std::move(package)), other(std::move(other)) {}
    void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                    torch::jit::Stack* stack) {
        const auto given = torch::jit::last(*stack, handle.schema().arguments().size());
        const auto wants_gradient = [](const c10::IValue& value) {
            return value.isTensor() && value.toTensor().requires_grad();
        };
        Results results;
        if (!store.retired && given.back().toStringRef() == package &&
            (!at::GradMode::is_enabled() ||
             std::none_of(given.begin(), given.end(), wants_gradient)))
            results = serve(store, given);
        if (results.empty()) return other.callBoxed(handle, keys, stack);
        torch::jit::drop(*stack, given.size());
        for (auto& result : results) stack->emplace_back(std::move(result));
    }
};

// For the life of the process, as the operators in Python.
void take_operators(Store& store, const char* space, const std::string& overload,
                    const std::string& package) {
    using K = c10::DispatchKey;
    const auto key = store.device_type == at::kCPU ? K::AutogradCPU : K::AutogradCUDA;
    auto* library = new torch::Library(torch::Library::IMPL, space, key, __FILE__, __LINE__);
    for (const auto& [name, serve] : OPERATORS) {
        const auto full_name = std::string(space) + "::" + name;
        const auto handle =
            c10::Dispatcher::singleton().findSchemaOrThrow(full_name.c_str(), overload.c_str());
        auto other = handle.getComputedKernelForDispatchKey(key);
        library->impl((name + ("." + overload)).c_str(),
                      torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Operator>(
                          store, serve, package, std::move(other))));
    }
}

// ---- PyTorch's own backward ---------------------------------------------------------------------
// A kernel for the key of the device, below autograd, before the one of `install()` in Python. What
// it does not serve goes to the Python function itself: a call that is under way when the package
// is uninstalled has to end as it began, and PyTorch calls no kernel that it has removed.

template <class Items, class Make>
PyObject* list_of(const Items& items, Make make) {
    const Reference list(PyList_New(items.size()));
    for (size_t i = 0; i < items.size(); ++i) PyList_SET_ITEM(list.object, i, make(items[i]));
    return Py_NewRef(list.object);
}

struct PyTorchsBackward : c10::OperatorKernel {
    Store& store;
    PyObject* const python;  // stays alive as long as this
    PyTorchsBackward(Store& store, PyObject* python) : store(store), python(python) {}
    // dy, x, normalized_shape, rstd, weight, output_mask
    void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
        const auto given = torch::jit::pop(*stack, 6);
        const auto tensor = [&](int i) {
            return given[i].isTensor() ? given[i].toTensor() : at::Tensor();
        };
        const at::Tensor dy = tensor(0), x = tensor(1), rstd = tensor(3), weight = tensor(4);
        const auto shape = given[2].toIntVector();
        const auto wanted = given[5].toBoolList().vec();
        Results results;
        if (shape.size() == 1 && wanted == std::vector<bool>{true, true} &&
            !may_be_differentiated(dy, x))
            results = backward_without_gil(store, dy, x, rstd, weight);
        if (results.empty()) {
            const pybind11::gil_scoped_acquire gil;
            const Reference arguments[] = {Reference(THPVariable_Wrap(dy)),
                                           Reference(THPVariable_Wrap(x)),
                                           Reference(list_of(shape, PyLong_FromLongLong)),
                                           Reference(THPVariable_Wrap(rstd)),
                                           Reference(THPVariable_Wrap(weight)),
                                           Reference(list_of(wanted, PyBool_FromLong))};
            results = call(python, arguments);
        }
        for (auto& result : results) stack->emplace_back(std::move(result));
    }
};

// The kernel stays in its place as long as the library.
torch::Library* take_backward(Store& store, PyObject* python) {
    using K = c10::DispatchKey;
    const auto key = store.device_type == at::kCPU ? K::CPU : K::CUDA;
    auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__,
                                                    __LINE__);
    library->impl("_fused_rms_norm_backward",
                  torch::CppFunction::makeFromBoxedFunctor(
                      std::make_unique<PyTorchsBackward>(store, python)));
    return library.release();
}

}  // namespace NORMFORGE_NAMESPACE
