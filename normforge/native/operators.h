// What PyTorch calls of native.cpp: the autograd node of a norm, and kernels of the operators, which
// compiled code calls.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <set>

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
    Reference(PyObject* taken) : object(taken) {
        if (!object) {
            python_error error;
            error.persist();
            throw std::move(error);
        }
    }
    Reference(Reference&& other) : object(std::exchange(other.object, nullptr)) {}
    ~Reference() { Py_XDECREF(object); }
};

struct WithoutGil {  // where this thread has it
    std::optional<pybind11::gil_scoped_release> released;
    WithoutGil() {
        if (PyGILState_Check()) released.emplace();
    }
};

// The results of a Python function; a result of None is undefined.
Results call(PyObject* function, PyObject* const* arguments, size_t count, size_t wanted) {
    const Reference answer(PyObject_Vectorcall(function, arguments, count, nullptr));
    TORCH_CHECK_TYPE(PyTuple_Check(answer.object) &&
                         PyTuple_GET_SIZE(answer.object) == static_cast<Py_ssize_t>(wanted),
                     wanted, " results were expected");
    Results results(wanted);
    for (size_t i = 0; i < wanted; ++i) {
        PyObject* item = PyTuple_GET_ITEM(answer.object, i);
        TORCH_CHECK_TYPE(Py_IsNone(item) || THPVariable_Check(item), "a result must be a tensor");
        if (!Py_IsNone(item)) results[i] = THPVariable_Unpack(item);
    }
    return results;
}

Results call(PyObject* function, const std::vector<Reference>& given, size_t wanted) {
    std::vector<PyObject*> arguments;
    for (const auto& each : given) arguments.push_back(each.object);
    return call(function, arguments.data(), arguments.size(), wanted);
}

double number(PyObject* object) {
    const double number = PyFloat_AsDouble(object);
    if (PyErr_Occurred()) Reference{nullptr};
    return number;
}

std::optional<double> number_or_none(PyObject* object) {
    return Py_IsNone(object) ? std::nullopt : std::optional(number(object));
}

float fp32(std::optional<double> number) { return number ? float(*number) : FLT_EPSILON; }

Results serve_without_gil(Store& store, int which, const Given& given, Numbers numbers = {}) {
    const WithoutGil others_may_run;
    return serve(store, which, given, numbers);
}

// The gradients of the parameters from what the kernel of a backward gives, of those that are wanted.
// Two are the rows of one tensor.
std::vector<at::Tensor> split(const at::Tensor& sums, c10::ArrayRef<bool> wanted) {
    std::vector<at::Tensor> parts(wanted.size());
    for (size_t i = 0; i < wanted.size(); ++i)
        if (wanted[i]) parts[i] = wanted.size() == 1 ? sums : sums.select(0, i);
    return parts;
}

// Whether somebody may ask the results of a backward for their gradient, which Python refuses.
bool may_be_differentiated(const at::Tensor& dy, const at::Tensor& x) {
    return at::GradMode::is_enabled() && (dy.requires_grad() || x.requires_grad());
}

struct Norm : torch::autograd::Function<Norm> {
    // arguments: the Python objects of x, weight, of a norm that has one the bias, and the numbers
    static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                              const std::optional<at::Tensor>& weight,
                              const std::optional<at::Tensor>& bias, Store* store,
                              PyObject* const* arguments) {
        const auto& kind = store->kinds[kForward];
        const size_t tensors = 2 + store->with_bias(), count = kind.numbers.size();
        const auto eps = number_or_none(arguments[tensors]);
        const double offset = count > 1 ? number(arguments[tensors + 1]) : 0;
        const float numbers[] = {fp32(eps), float(offset)};
        Results results;
        if (weight) {
            Given given{&x, &*weight};
            if (bias) given.push_back(&*bias);
            results = serve_without_gil(*store, bias ? kForwardOfThree : kForward, given,
                                        {numbers, count});
        }
        if (results.empty())
            results = call(store->forward, arguments, tensors + count, kind.made.size());
        variable_list kept{x, weight.value_or(at::Tensor())};
        kept.insert(kept.end(), results.rbegin(), results.rend() - 1);  // rstd, and the mean
        ctx->save_for_backward(kept);
        ctx->set_materialize_grads(false);
        ctx->saved_data["store"] = reinterpret_cast<int64_t>(store);
        ctx->saved_data["bias"] = bias.has_value();
        ctx->saved_data["offset"] = offset;
        if (eps) ctx->saved_data["eps"] = *eps;
        return results[0];
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
        if (!gradients[0].defined()) return variable_list(5);
        const auto saved = ctx->get_saved_variables();
        const auto &dy = gradients[0], &x = saved[0], &weight = saved[1], &rstd = saved[2];
        auto& store = *reinterpret_cast<Store*>(ctx->saved_data.at("store").toInt());
        const double offset = ctx->saved_data.at("offset").toDouble();
        const bool need_dx = ctx->needs_input_grad(0);
        const bool need_dw = weight.defined() && ctx->needs_input_grad(1);
        const bool need_db =
            ctx->saved_data.at("bias").toBool() && ctx->needs_input_grad(1 + weight.defined());
        const bool wanted[] = {need_dw, need_db};
        const size_t parameters = 1 + store.with_bias();
        const auto eps = ctx->saved_data.find("eps");
        const bool none = eps == ctx->saved_data.end();
        const bool usual = none || eps->second.toDouble() >= NORMFORGE_SMALLEST_EPS;
        Results results;
        if (need_dx && (need_dw || need_db) && offset == 0 && usual &&
            !at::GradMode::is_enabled()) {
            Given given{&dy, &x, &rstd, &weight};
            if (saved.size() > 3) given.push_back(&saved[3]);
            results = serve_without_gil(store, kBackward, given);
        }
        if (!results.empty()) {
            const auto parts = split(results[1], c10::ArrayRef<bool>(wanted, parameters));
            results.resize(1);
            results.insert(results.end(), parts.begin(), parts.end());
        } else {
            const pybind11::gil_scoped_acquire gil;
            std::vector<Reference> given;
            given.emplace_back(THPVariable_Wrap(dy));
            for (const auto& each : saved) given.emplace_back(THPVariable_Wrap(each));
            given.emplace_back(none ? Py_NewRef(Py_None)
                                    : PyFloat_FromDouble(eps->second.toDouble()));
            if (store.kinds[kForward].numbers.size() > 1)
                given.emplace_back(PyFloat_FromDouble(offset));
            given.emplace_back(PyBool_FromLong(need_dx));
            for (size_t i = 0; i < parameters; ++i) given.emplace_back(PyBool_FromLong(wanted[i]));
            results = call(store.gradients, given, 1 + parameters);
        }
        results.resize(5);
        return results;
    }
};

// ---- The operators ------------------------------------------------------------------------------
// Kernels for autograd's key of the device, where every call of an operator arrives. They come
// before those in Python, which take all that is not a plain call with a plan. Packages share the
// operators: each has a kernel before those of the packages that came earlier, and serves the calls
// that ask for it, by the last argument.

using Values = c10::ArrayRef<c10::IValue>;

size_t place_of(const c10::FunctionSchema& schema, const std::string& name) {
    const auto found = schema.argumentIndexWithName(name);
    TORCH_CHECK(found, schema.name(), " has no argument ", name);
    return *found;
}

// Where a call of an operator has what a kind of call takes. options: all other arguments, which are
// None, 0 or true in such a call.
struct Places {
    int which;
    std::vector<size_t> tensors, numbers, options;
    Places(const Store& store, int which, const c10::FunctionSchema& schema) : which(which) {
        const auto& kind = store.kinds[which];
        std::vector<bool> taken(schema.arguments().size());
        taken[place_of(schema, "package")] = true;
        for (const auto& name : kind.names) tensors.push_back(place_of(schema, name));
        for (const auto& name : kind.numbers) numbers.push_back(place_of(schema, name));
        for (const auto* places : {&tensors, &numbers})
            for (const auto at : *places) taken[at] = true;
        for (size_t at = 0; at < taken.size(); ++at)
            if (!taken[at]) options.push_back(at);
    }

    Results serve(Store& store, Values given) const {
        Given found;
        c10::SmallVector<float, 2> values;
        for (const auto at : tensors) {
            if (!given[at].isTensor()) return {};
            found.push_back(&given[at].toTensor());
        }
        for (const auto at : options) {
            const auto& value = given[at];
            if (!(value.isNone() || (value.isDouble() && value.toDouble() == 0) ||
                  (value.isBool() && value.toBool())))
                return {};
        }
        for (const auto at : numbers) values.push_back(fp32(given[at].toOptional<double>()));
        return serve_without_gil(store, which, found, values);
    }
};

struct Operator : c10::OperatorKernel {
    Store& store;
    const size_t package_at;
    const std::string package;
    const c10::SafeKernelFunction other;  // of another package, or in Python
    std::vector<Places> places;           // of the kinds of calls that it serves
    Operator(Store& store, const std::string& name, std::string package,
             const c10::FunctionSchema& schema, c10::SafeKernelFunction other)
        : store(store),
          package_at(place_of(schema, "package")),
          package(std::move(package)),
          other(std::move(other)) {
        for (int which = 0; which < kKinds; ++which)
            if (store.kinds[which].operation == name) places.emplace_back(store, which, schema);
    }
    void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                    torch::jit::Stack* stack) {
        const auto& schema = handle.schema();
        const auto given = torch::jit::last(*stack, schema.arguments().size());
        const auto wants_gradient = [](const c10::IValue& value) {
            return value.isTensor() && value.toTensor().requires_grad();
        };
        Results results;
        if (!store.retired && given[package_at].toStringRef() == package &&
            (!at::GradMode::is_enabled() ||
             std::none_of(given.begin(), given.end(), wants_gradient)))
            for (size_t i = 0; i < places.size() && results.empty(); ++i)
                results = places[i].serve(store, given);
        if (results.empty()) return other.callBoxed(handle, keys, stack);
        while (results.size() < schema.returns().size())  // the results of options
            results.push_back(allocate({0}, {1}, results[0], results[0].scalar_type()));
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
    std::set<std::string> names;
    for (const auto& kind : store.kinds) names.insert(kind.operation);
    for (const auto& name : names) {
        const auto full_name = std::string(space) + "::" + name;
        const auto handle =
            c10::Dispatcher::singleton().findSchemaOrThrow(full_name.c_str(), overload.c_str());
        auto other = handle.getComputedKernelForDispatchKey(key);
        library->impl((name + ("." + overload)).c_str(),
                      torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Operator>(
                          store, name, package, handle.schema(), std::move(other))));
    }
}

}  // namespace NORMFORGE_NAMESPACE
