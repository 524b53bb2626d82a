// PyTorch's own backward, for `install()`.
// A kernel for the key of the device, below autograd, before the one of `install()` in Python. What
// it does not serve goes to the Python function itself: a call that is under way when the package
// is uninstalled has to end as it began, and PyTorch calls no kernel that it has removed.

#pragma once

#include "operators.h"

namespace NORMFORGE_NAMESPACE {

template <class Items, class Make>
PyObject* list_of(const Items& items, Make make) {
    const Reference list(PyList_New(items.size()));
    for (size_t i = 0; i < items.size(); ++i) PyList_SET_ITEM(list.object, i, make(items[i]));
    return Py_NewRef(list.object);
}

Reference object_of(const c10::IValue& value) {
    if (value.isTensor()) return THPVariable_Wrap(value.toTensor());
    if (value.isIntList()) return list_of(value.toIntVector(), PyLong_FromLongLong);
    if (value.isBoolList()) return list_of(value.toBoolList().vec(), PyBool_FromLong);
    return Py_NewRef(Py_None);
}

struct PyTorchsBackward : c10::OperatorKernel {
    Store& store;
    PyObject* const python;  // stays alive as long as this
    std::vector<size_t> tensors;
    size_t shape_at, mask_at;
    std::optional<int> bias_at;
    PyTorchsBackward(Store& store, PyObject* python, const c10::FunctionSchema& schema)
        : store(store),
          python(python),
          shape_at(place_of(schema, "normalized_shape")),
          mask_at(place_of(schema, "output_mask")),
          bias_at(schema.argumentIndexWithName("bias")) {
        for (const auto& name : store.kinds[kBackward].names)
            tensors.push_back(place_of(schema, name == "dy"  ? "grad_out"
                                               : name == "x" ? "input"
                                                             : name));
    }
    void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet,
                    torch::jit::Stack* stack) {
        const auto given = torch::jit::pop(*stack, handle.schema().arguments().size());
        const auto mask = given[mask_at].toBoolList().vec();
        const size_t parameters = 1 + store.with_bias();
        Given found;
        for (const auto at : tensors)
            if (given[at].isTensor()) found.push_back(&given[at].toTensor());
        // A kernel gives both sums or none, in the weight's dtype. Autograd gives an undefined
        // tensor where there is no bias.
        const bool has_bias =
            bias_at && given[*bias_at].isTensor() && given[*bias_at].toTensor().defined();
        const bool alike =
            found.size() == tensors.size() &&
            (!has_bias || given[*bias_at].toTensor().scalar_type() == found[3]->scalar_type());
        Results results;
        if (given[shape_at].toIntVector().size() == 1 && mask.size() == 1 + parameters &&
            mask[0] && (mask[1] || mask.back()) && alike &&
            !may_be_differentiated(*found[0], *found[1]))
            results = serve_without_gil(store, kBackward, found);
        if (results.empty()) {
            const pybind11::gil_scoped_acquire gil;
            std::vector<Reference> arguments;
            for (const auto& value : given) arguments.push_back(object_of(value));
            results = call(python, arguments, 1 + parameters);
        } else {
            const bool wanted[] = {mask[1], mask.back()};
            stack->emplace_back(std::move(results[0]));
            results = split(results[1], c10::ArrayRef<bool>(wanted, parameters));
        }
        for (auto& result : results) stack->emplace_back(std::move(result));
    }
};

// The kernel stays in its place as long as the library.
torch::Library* take_backward(Store& store, const std::string& name, PyObject* python) {
    using K = c10::DispatchKey;
    const auto key = store.device_type == at::kCPU ? K::CPU : K::CUDA;
    const auto handle =
        c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + name).c_str(), "");
    auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__,
                                                    __LINE__);
    library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(
                                    std::make_unique<PyTorchsBackward>(store, python,
                                                                       handle.schema())));
    return library.release();
}

}  // namespace NORMFORGE_NAMESPACE
