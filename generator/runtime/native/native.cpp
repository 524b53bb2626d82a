// The fast path of a package in C++: an autograd node, an operator, and the launch of calls that
// were learned.
//
// A backward that autograd runs in a thread of its own pays for the interpreter there. This file
// serves, without it, what Python has served on the same stream before: a plain call (a weight,
// both gradients, everything dense and aligned, no option) whose launch Python described as a plan.
// Whatever differs in anything is "not served" and goes to Python, which stays the one place that
// decides. native.py builds and loads this file and makes the plans.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <torch/csrc/Dtype.h>
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
    Results results;
    for (size_t i = 0; i < 2; ++i) {
        PyObject* item = PyTuple_GET_ITEM(answer.object, i);
        TORCH_CHECK_TYPE(Py_IsNone(item) || THPVariable_Check(item), "a result must be a tensor");
        if (!Py_IsNone(item)) results[i] = THPVariable_Unpack(item);
    }
    return results;
}

struct Norm : torch::autograd::Function<Norm> {
    // arguments: the Python objects of x, weight, eps and offset
    static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x,
                              const std::optional<at::Tensor>& weight, Store* store,
                              PyObject* const* arguments) {
        auto [y, rstd] = call(store->forward, arguments, 4);
        ctx->save_for_backward({x, weight.value_or(at::Tensor()), rstd});
        const double offset = PyFloat_AsDouble(arguments[3]);
        const double eps = Py_IsNone(arguments[2]) ? 0.0 : PyFloat_AsDouble(arguments[2]);
        if (PyErr_Occurred()) Reference{nullptr};
        ctx->saved_data["store"] = reinterpret_cast<int64_t>(store);
        ctx->saved_data["offset"] = offset;
        if (!Py_IsNone(arguments[2])) ctx->saved_data["eps"] = eps;
        return y;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
        const auto saved = ctx->get_saved_variables();
        const auto &dy = gradients[0], &x = saved[0], &weight = saved[1], &rstd = saved[2];
        auto& store = *reinterpret_cast<Store*>(ctx->saved_data.at("store").toInt());
        const double offset = ctx->saved_data.at("offset").toDouble();
        const bool need_dx = ctx->needs_input_grad(0);
        const bool need_dw = weight.defined() && ctx->needs_input_grad(1);
        if (need_dx && need_dw && offset == 0 && !at::GradMode::is_enabled()) {
            const WithoutGil others_may_run;
            if (const auto results = serve(store, dy, x, rstd, weight))
                return {(*results)[0], (*results)[1], {}, {}};
        }

        const pybind11::gil_scoped_acquire gil;
        const auto eps = ctx->saved_data.find("eps");
        const Reference given[] = {
            Reference(THPVariable_Wrap(dy)),
            Reference(THPVariable_Wrap(x)),
            Reference(THPVariable_Wrap(weight)),
            Reference(THPVariable_Wrap(rstd)),
            Reference(eps == ctx->saved_data.end() ? Py_NewRef(Py_None)
                                                   : PyFloat_FromDouble(eps->second.toDouble())),
            Reference(PyFloat_FromDouble(offset)),
            Reference(PyBool_FromLong(need_dx)),
            Reference(PyBool_FromLong(need_dw))};
        PyObject* arguments[8];
        for (size_t i = 0; i < 8; ++i) arguments[i] = given[i].object;
        const auto [dx, dw] = call(store.gradients, arguments, 8);
        return {dx, dw, {}, {}};
    }
};

// ---- The operator -------------------------------------------------------------------------------

// The backward for autograd's key of the device, where every call of the operator arrives. It comes
// before the kernel in Python, which takes all that is not a plain call with a plan.
struct BackwardOperator : c10::OperatorKernel {
    Store& store;
    const c10::SafeKernelFunction python;
    BackwardOperator(Store& store, c10::SafeKernelFunction python)
        : store(store), python(std::move(python)) {}

    // dy, x, rstd, weight, dresidual, dw_dtype, weight_offset, need_dx, need_dw
    std::optional<Results> serve_plain(c10::ArrayRef<c10::IValue> given) {
        if (!given[3].isTensor() || !given[4].isNone() || !given[5].isNone()) return {};
        if (given[6].toDouble() != 0 || !given[7].toBool() || !given[8].toBool()) return {};
        const auto wants_gradient = [&](int i) { return given[i].toTensor().requires_grad(); };
        if (at::GradMode::is_enabled())
            for (int i = 0; i < 4; ++i)
                if (wants_gradient(i)) return {};
        const WithoutGil others_may_run;
        return serve(store, given[0].toTensor(), given[1].toTensor(), given[2].toTensor(),
                     given[3].toTensor());
    }

    void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                    torch::jit::Stack* stack) {
        const auto found = serve_plain(torch::jit::last(*stack, 9));
        if (!found) return python.callBoxed(handle, keys, stack);
        auto nothing = allocate({0}, {1}, (*found)[0]);
        torch::jit::drop(*stack, 9);
        torch::jit::push(*stack, (*found)[0], (*found)[1], std::move(nothing));
    }
};

// ---- What Python sees ---------------------------------------------------------------------------

struct StoreObject {
    PyObject_HEAD
    Store* store;
};

Store& store_of(PyObject* self) { return *reinterpret_cast<StoreObject*>(self)->store; }

bool four(Py_ssize_t count) {
    if (count != 4) PyErr_Format(PyExc_TypeError, "4 arguments were expected, got %zd", count);
    return count == 4;
}

PyObject* norm(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    if (!four(count)) return nullptr;
    PyObject *x = arguments[0], *weight = arguments[1];
    auto& store = store_of(self);
    if (!THPVariable_Check(x) || !(Py_IsNone(weight) || THPVariable_Check(weight)))
        return PyObject_Vectorcall(store.forward, arguments, 4, nullptr);  // says what is wrong
    std::optional<at::Tensor> scale;
    if (!Py_IsNone(weight)) scale = THPVariable_Unpack(weight);
    return THPVariable_Wrap(Norm::apply(THPVariable_Unpack(x), scale, &store, arguments));
    END_HANDLE_TH_ERRORS
}

PyObject* backward(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    if (!four(count)) return nullptr;
    for (Py_ssize_t i = 0; i < 4; ++i)
        if (!THPVariable_CheckExact(arguments[i])) Py_RETURN_NONE;
    const auto of = [&](int i) -> at::Tensor { return THPVariable_Unpack(arguments[i]); };
    const at::Tensor dy = of(0), x = of(1), rstd = of(2), weight = of(3);
    if (at::GradMode::is_enabled() && (dy.requires_grad() || x.requires_grad())) Py_RETURN_NONE;
    auto& store = store_of(self);
    std::optional<Results> results;
    {
        const WithoutGil others_may_run;
        results = serve(store, dy, x, rstd, weight);
    }
    if (!results) Py_RETURN_NONE;
    const Reference dx(THPVariable_Wrap((*results)[0])), dw(THPVariable_Wrap((*results)[1]));
    return PyTuple_Pack(2, dx.object, dw.object);
    END_HANDLE_TH_ERRORS
}

Lane& lane_of(Store& store, int64_t device, uint64_t stream) {
    const std::lock_guard<std::mutex> lock(store.mutex);
    return store.lanes[{device, reinterpret_cast<void*>(stream)}];
}

// (device, stream, scratch or None): from here on plans of this stream use this scratch, or, with
// None, nothing is launched there. Returns when no launch of before is under way.
PyObject* set_scratch(PyObject* self, PyObject* arguments) {
    int device = 0;
    unsigned long long stream = 0;
    PyObject* scratch = nullptr;
    if (!PyArg_ParseTuple(arguments, "iKO", &device, &stream, &scratch)) return nullptr;
    const bool paused = Py_IsNone(scratch);
    const uint64_t address = paused ? 0 : PyLong_AsUnsignedLongLong(scratch);
    if (PyErr_Occurred()) return nullptr;
    auto& lane = lane_of(store_of(self), device, stream);
    {
        const pybind11::gil_scoped_release others_may_finish;
        const std::lock_guard<std::mutex> lock(lane.mutex);
        lane.paused = paused;
        lane.scratch = address;
    }
    Py_RETURN_NONE;
}

struct Bytes {
    const char* data = nullptr;
    Py_ssize_t size = 0;
    std::vector<uint64_t> words() const {
        std::vector<uint64_t> words((size + 7) / 8);
        if (size) std::memcpy(words.data(), data, size);
        return words;
    }
};

struct KernelWords {
    unsigned long long config = 0, function = 0;
    Bytes offsets;
    Kernel of(const Plan& plan) const {
        Kernel kernel{reinterpret_cast<void*>(config), reinterpret_cast<void*>(function), {}};
        auto* base = reinterpret_cast<char*>(const_cast<uint64_t*>(plan.block.data()));
        for (const auto offset : offsets.words()) kernel.parameters.push_back(base + offset);
        return kernel;
    }
};

// (device, stream, rows, columns, dtype, weight dtype, block, offsets of scratch, main, second):
// what serves such calls. A kernel is (configuration, function, offsets of its parameters); offsets
// are in bytes of the block, each a word of 8 bytes. The first plan of a kind stays.
PyObject* add(PyObject* self, PyObject* arguments) {
    HANDLE_TH_ERRORS
    int device = 0;
    unsigned long long stream = 0;
    long long rows = 0, columns = 0;
    PyObject *dtype = nullptr, *weight_dtype = nullptr;
    Bytes block, scratch_at;
    KernelWords main, second;
    if (!PyArg_ParseTuple(arguments, "iKLLO!O!y#y#(KKy#)(KKy#)", &device, &stream, &rows, &columns,
                          &THPDtypeType, &dtype, &THPDtypeType, &weight_dtype, &block.data,
                          &block.size, &scratch_at.data, &scratch_at.size, &main.config,
                          &main.function, &main.offsets.data, &main.offsets.size, &second.config,
                          &second.function, &second.offsets.data, &second.offsets.size))
        return nullptr;
    const auto scalar = [](PyObject* of) { return reinterpret_cast<THPDtype*>(of)->scalar_type; };
    const Key key(device, reinterpret_cast<void*>(stream), rows, columns, scalar(dtype),
                  scalar(weight_dtype));
    auto& store = store_of(self);
    auto& lane = lane_of(store, device, stream);
    const std::lock_guard<std::mutex> lock(store.mutex);
    auto& plan = store.plans[key];
    if (plan.lane == nullptr) {
        plan.block = block.words();
        plan.scratch_at = scratch_at.words();
        plan.main = main.of(plan);
        plan.second = second.of(plan);
        plan.lane = &lane;
    }
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

// (namespace, operator): from now on its calls are served here where they can be.
PyObject* take_operator(PyObject* self, PyObject* arguments) {
    HANDLE_TH_ERRORS
    const char *space = nullptr, *name = nullptr;
    if (!PyArg_ParseTuple(arguments, "ss", &space, &name)) return nullptr;
    auto& store = store_of(self);
    using K = c10::DispatchKey;
    const auto key = store.device_type == at::kCPU ? K::AutogradCPU : K::AutogradCUDA;
    const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(
        (std::string(space) + "::" + name).c_str(), "");
    auto kernel =
        std::make_unique<BackwardOperator>(store, handle.getComputedKernelForDispatchKey(key));
    // For the life of the process, as the operator.
    auto* library = new torch::Library(torch::Library::IMPL, space, key, __FILE__, __LINE__);
    library->impl(name, torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

// (the four addresses of Driver, on the CPU?, forward, gradients): a new store
PyObject* make_store(PyTypeObject* type, PyObject* arguments, PyObject*) {
    unsigned long long at[4];
    int on_cpu = 0;
    PyObject *forward = nullptr, *gradients = nullptr;
    if (!PyArg_ParseTuple(arguments, "(KKKK)pOO", at, at + 1, at + 2, at + 3, &on_cpu, &forward,
                          &gradients))
        return nullptr;
    PyObject* self = type->tp_alloc(type, 0);
    if (self == nullptr) return nullptr;
    auto* store = reinterpret_cast<StoreObject*>(self)->store = new Store;
    static_assert(sizeof store->driver == sizeof at, "addresses of 64 bits");
    std::memcpy(&store->driver, at, sizeof at);
    if (on_cpu) store->device_type = at::kCPU;
    store->forward = Py_NewRef(forward);
    store->gradients = Py_NewRef(gradients);
    return self;
}

template <class F>
PyCFunction as_method(F* function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {{"norm", as_method(norm), METH_FASTCALL, nullptr},
                         {"backward", as_method(backward), METH_FASTCALL, nullptr},
                         {"set_scratch", set_scratch, METH_VARARGS, nullptr},
                         {"add", add, METH_VARARGS, nullptr},
                         {"take_operator", take_operator, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyType_Slot slots[] = {{Py_tp_methods, methods},
                       {Py_tp_new, reinterpret_cast<void*>(make_store)},
                       {0, nullptr}};
PyType_Spec store_type = {"normforge_native.Store", sizeof(StoreObject), 0, Py_TPFLAGS_DEFAULT,
                          slots};

int fill(PyObject* module) {
    PyObject* type = PyType_FromSpec(&store_type);
    return type == nullptr ? -1 : PyModule_AddObject(module, "Store", type);
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, reinterpret_cast<void*>(fill)}, {0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "normforge_native", nullptr, 0, nullptr,
                      module_slots, nullptr, nullptr, nullptr};

}  // namespace NORMFORGE_NAMESPACE

// Every load makes a module of its own, which is in no list of modules: packages share nothing.
PyMODINIT_FUNC PyInit_normforge_native() { return PyModuleDef_Init(&NORMFORGE_NAMESPACE::module); }
