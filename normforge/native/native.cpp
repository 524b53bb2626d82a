// The fast path of a package in C++: an autograd node, operators, and the launch of calls that were
// learned.
//
// A backward that autograd runs in a thread of its own pays for the interpreter there, and so does
// an operator that compiled code calls. These files serve, without it, what Python has served on
// the same stream before: a plain call (a weight, everything dense and aligned, of a backward both
// gradients and no option) whose launch Python described as a plan. Whatever differs in anything is
// "not served" and goes to Python, which stays the one place that decides. native.py builds and
// loads this file, plans.py makes the plans.

#include <iterator>
#include <sstream>

#include "installed.h"

namespace NORMFORGE_NAMESPACE {

// ---- What Python sees ---------------------------------------------------------------------------

struct StoreObject {
    PyObject_HEAD
    Store* store;
};

Store& store_of(PyObject* self) { return *reinterpret_cast<StoreObject*>(self)->store; }

PyObject* tuple_or_none(const Results& results) {
    if (results.empty()) Py_RETURN_NONE;
    const Reference tuple(PyTuple_New(results.size()));
    for (size_t i = 0; i < results.size(); ++i) {
        const Reference result(THPVariable_Wrap(results[i]));
        PyTuple_SET_ITEM(tuple.object, i, Py_NewRef(result.object));
    }
    return Py_NewRef(tuple.object);
}

bool are(Py_ssize_t count, Py_ssize_t wanted) {
    if (count != wanted)
        PyErr_Format(PyExc_TypeError, "%zd arguments were expected, got %zd", wanted, count);
    return count == wanted;
}

// x, weight and, of a norm that has one, the bias, each but x may be None, and the numbers
PyObject* norm(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    auto& store = store_of(self);
    const Py_ssize_t tensors = 2 + store.with_bias();
    if (!are(count, tensors + store.kinds[kForward].numbers.size())) return nullptr;
    std::optional<at::Tensor> given[3];
    for (Py_ssize_t i = 0; i < tensors; ++i) {
        if (THPVariable_Check(arguments[i]))
            given[i] = THPVariable_Unpack(arguments[i]);
        else if (i == 0 || !Py_IsNone(arguments[i]))  // Python says what is wrong
            return PyObject_Vectorcall(store.forward, arguments, count, nullptr);
    }
    return THPVariable_Wrap(Norm::apply(*given[0], given[1], given[2], &store, arguments));
    END_HANDLE_TH_ERRORS
}

// The tensors of Python objects; false where one is none of the plain types.
bool unpack(PyObject* const* arguments, size_t count, Given& given) {
    for (size_t i = 0; i < count; ++i) {
        if (!THPVariable_CheckExact(arguments[i])) return false;
        given.push_back(&THPVariable_Unpack(arguments[i]));
    }
    return true;
}

// x, weight, a third tensor or None, numbers
PyObject* forward(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    auto& store = store_of(self);
    const auto expected = store.kinds[kForward].numbers.size();
    if (!are(count, 3 + expected)) return nullptr;
    const bool of_three = !Py_IsNone(arguments[2]);
    Given given;
    if (!unpack(arguments, 2 + of_three, given)) Py_RETURN_NONE;
    c10::SmallVector<float, 2> numbers;
    for (size_t i = 0; i < expected; ++i) numbers.push_back(fp32(number_or_none(arguments[3 + i])));
    return tuple_or_none(
        serve_without_gil(store, of_three ? kForwardOfThree : kForward, given, numbers));
    END_HANDLE_TH_ERRORS
}

PyObject* backward(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    auto& store = store_of(self);
    if (!are(count, store.kinds[kBackward].names.size())) return nullptr;
    Given given;
    if (!unpack(arguments, count, given) || may_be_differentiated(*given[0], *given[1]))
        Py_RETURN_NONE;
    return tuple_or_none(serve_without_gil(store, kBackward, given));
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

// (kind, device, stream, rows, columns, dtype, weight dtype, block, offsets of what a call gives,
// offsets of scratch, main, second): what serves such calls. A kernel is (configuration, function,
// offsets of its parameters); offsets are in bytes of the block, each a word of 8 bytes. The first
// plan of such calls stays.
PyObject* add(PyObject* self, PyObject* arguments) {
    HANDLE_TH_ERRORS
    int kind = 0, device = 0;
    unsigned long long stream = 0;
    long long rows = 0, columns = 0;
    PyObject *dtype = nullptr, *weight_dtype = nullptr;
    Bytes block, places, scratch_at;
    KernelWords main, second;
    if (!PyArg_ParseTuple(arguments, "iiKLLO!O!y#y#y#(KKy#)(KKy#)", &kind, &device, &stream, &rows,
                          &columns, &THPDtypeType, &dtype, &THPDtypeType, &weight_dtype, &block.data,
                          &block.size, &places.data, &places.size, &scratch_at.data,
                          &scratch_at.size, &main.config,
                          &main.function, &main.offsets.data, &main.offsets.size, &second.config,
                          &second.function, &second.offsets.data, &second.offsets.size))
        return nullptr;
    const auto scalar = [](PyObject* of) { return reinterpret_cast<THPDtype*>(of)->scalar_type; };
    auto& store = store_of(self);
    auto& lane = lane_of(store, device, stream);
    const std::lock_guard<std::mutex> lock(store.mutex);
    const Key key(kind, device, reinterpret_cast<void*>(stream), rows, columns, scalar(dtype),
                  scalar(weight_dtype));
    auto& plan = store.plans[key];
    if (plan.lane == nullptr) {
        plan.block = block.words();
        plan.places = places.words();
        plan.scratch_at = scratch_at.words();
        plan.main = main.of(plan);
        plan.second = second.of(plan);
        plan.own.paused = false;
        plan.lane = scratch_at.size ? &lane : &plan.own;
    }
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

// (): [(kind, rows, columns, dtype, weight dtype, calls)] of every plan, as served so far.
PyObject* calls(PyObject* self, PyObject*) {
    HANDLE_TH_ERRORS
    auto& store = store_of(self);
    std::vector<std::pair<Key, uint64_t>> found;
    {
        const std::lock_guard<std::mutex> lock(store.mutex);
        for (const auto& [key, plan] : store.plans) found.emplace_back(key, plan.calls);
    }
    const Reference list(PyList_New(0));
    for (const auto& [key, count] : found) {
        const auto& [kind, device, stream, rows, columns, dtype, weight_dtype] = key;
        const Reference entry(Py_BuildValue(
            "(iLLOOK)", kind, static_cast<long long>(rows), static_cast<long long>(columns),
            torch::getTHPDtype(dtype), torch::getTHPDtype(weight_dtype),
            static_cast<unsigned long long>(count)));
        if (PyList_Append(list.object, entry.object) != 0) return nullptr;
    }
    return Py_NewRef(list.object);
    END_HANDLE_TH_ERRORS
}

// (namespace, overload, package): from now on calls of these operators that ask for this package are
// served here where they can be.
PyObject* take_operators(PyObject* self, PyObject* arguments) {
    HANDLE_TH_ERRORS
    const char *space = nullptr, *overload = nullptr, *package = nullptr;
    if (!PyArg_ParseTuple(arguments, "sss", &space, &overload, &package)) return nullptr;
    take_operators(store_of(self), space, overload, package);
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

// (): another package has taken the name of this one: no operator is served from now on.
PyObject* retire(PyObject* self, PyObject*) {
    store_of(self).retired = true;
    Py_RETURN_NONE;
}

// (name, function): from now on calls of this backward of PyTorch are served here where they can be,
// else by the function, which the caller keeps alive. Ends when the answer is freed.
PyObject* take_backward(PyObject* self, PyObject* arguments) {
    HANDLE_TH_ERRORS
    const char* name = nullptr;
    PyObject* python = nullptr;
    if (!PyArg_ParseTuple(arguments, "sO", &name, &python)) return nullptr;
    auto* library = take_backward(store_of(self), name, python);
    return PyCapsule_New(library, nullptr, [](PyObject* capsule) {
        delete static_cast<torch::Library*>(PyCapsule_GetPointer(capsule, nullptr));
    });
    END_HANDLE_TH_ERRORS
}

std::vector<std::string> words(const char* text) {
    std::istringstream stream(text);
    return {std::istream_iterator<std::string>(stream), {}};
}

// (the four addresses of Driver, on the CPU?, three kinds, forward, gradients): a new store. A kind is
// (operator, names of tensors, their roles, those of results, names of numbers).
PyObject* make_store(PyTypeObject* type, PyObject* arguments, PyObject*) {
    unsigned long long at[4];
    int on_cpu = 0;
    PyObject *described[kKinds], *forward = nullptr, *gradients = nullptr;
    if (!PyArg_ParseTuple(arguments, "(KKKK)p(OOO)OO", at, at + 1, at + 2, at + 3, &on_cpu,
                          described, described + 1, described + 2, &forward, &gradients))
        return nullptr;
    const char* of[kKinds][5];
    for (int i = 0; i < kKinds; ++i)
        if (!PyArg_ParseTuple(described[i], "sssss", of[i], of[i] + 1, of[i] + 2, of[i] + 3, of[i] + 4))
            return nullptr;
    PyObject* self = type->tp_alloc(type, 0);
    if (self == nullptr) return nullptr;
    auto* store = reinterpret_cast<StoreObject*>(self)->store = new Store;
    static_assert(sizeof store->driver == sizeof at, "addresses of 64 bits");
    std::memcpy(&store->driver, at, sizeof at);
    if (on_cpu) store->device_type = at::kCPU;
    for (int i = 0; i < kKinds; ++i)
        store->kinds[i] = {of[i][0], words(of[i][1]), of[i][2], of[i][3], words(of[i][4])};
    store->forward = Py_NewRef(forward);
    store->gradients = Py_NewRef(gradients);
    return self;
}

template <class F>
PyCFunction as_method(F* function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {{"norm", as_method(norm), METH_FASTCALL, nullptr},
                         {"forward", as_method(forward), METH_FASTCALL, nullptr},
                         {"backward", as_method(backward), METH_FASTCALL, nullptr},
                         {"set_scratch", set_scratch, METH_VARARGS, nullptr},
                         {"add", add, METH_VARARGS, nullptr},
                         {"calls", calls, METH_NOARGS, nullptr},
                         {"take_operators", as_method<PyObject*(PyObject*, PyObject*)>(take_operators),
                          METH_VARARGS, nullptr},
                         {"retire", retire, METH_NOARGS, nullptr},
                         {"take_backward", as_method<PyObject*(PyObject*, PyObject*)>(take_backward),
                          METH_VARARGS, nullptr},
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
