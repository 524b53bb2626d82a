// Plans of native.cpp: what launches are made of, which calls they serve, and their launch.
//
// It is compiled against PyTorch's headers only. The driver's functions come as addresses, so that
// nothing here needs CUDA to be compiled, and tests can hand over functions of their own. Nothing
// here touches Python.

#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#ifdef NORMFORGE_CUDA
#include <ATen/cuda/EmptyTensor.h>
#endif

namespace NORMFORGE_NAMESPACE {  // one per version of these files: packages of several may meet

struct Driver {
    int32_t (*current_stream)(int32_t device, void** stream);  // PyTorch's, of this thread
    int (*current_device)(int* device);                        // an error without a context
    int (*is_capturing)(void* stream, int* status);
    int (*launch)(const void* config, void* function, void** parameters, void** extra);
};

// One stream. `mutex` spans both kernels of a call. While `paused`, nothing is launched: its
// scratch is being replaced.
struct Lane {
    std::mutex mutex;
    bool paused = true;
    uint64_t scratch = 0;
};

struct Kernel {
    const void* config = nullptr;
    void* function = nullptr;  // null: there is no such kernel
    std::vector<void*> parameters;
};

// block: the arguments of both kernels, which begin with the six addresses of the tensors; the
// driver copies them before a launch returns. The lane's mutex guards it.
struct Plan {
    Lane* lane = nullptr;
    std::vector<uint64_t> block;
    std::vector<uint64_t> scratch_at;  // offsets in bytes
    Kernel main, second;
};

using Key = std::tuple<int64_t, void*, int64_t, int64_t, at::ScalarType, at::ScalarType>;

// The plans of one package. Like its operators it stays for the life of the process, and with it
// all that it points to: nodes of a graph may outlive the package's module.
struct Store {
    Driver driver{};
    at::DeviceType device_type = at::kCUDA;
    PyObject* forward = nullptr;    // (x, weight, eps, offset) -> (y, rstd)
    PyObject* gradients = nullptr;  // (dy, x, weight, rstd, eps, offset, dx?, dw?) -> (dx, dw)
    std::mutex mutex;               // of the maps; what is in them is never taken out
    std::map<Key, Plan> plans;
    std::map<std::pair<int64_t, void*>, Lane> lanes;
};

using Results = std::array<at::Tensor, 2>;

at::Tensor allocate(at::IntArrayRef sizes, at::IntArrayRef strides, const at::Tensor& like) {
    // As Python does it: not filled with NaN in deterministic mode, because all of it is written.
#ifdef NORMFORGE_CUDA
    if (like.is_cuda())
        return at::detail::empty_strided_cuda(sizes, strides, like.scalar_type(), like.device());
#endif
    return at::detail::empty_strided_cpu(sizes, strides, like.scalar_type());
}

// Strides of a contiguous tensor exactly; `is_contiguous` lets dimensions of size 1 have any.
bool dense(const at::Tensor& tensor) {
    int64_t step = 1;
    for (int64_t i = tensor.dim() - 1; i >= 0; step *= tensor.size(i), --i)
        if (tensor.stride(i) != step) return false;
    return true;
}

// No subclass, transform, lazy negation, tangent, or anything else that has its own way with
// operators.
bool plain(const at::Tensor& tensor, at::Device device) {
    using K = c10::DispatchKey;
    constexpr c10::DispatchKeySet keys({K::CUDA, K::CPU, K::ADInplaceOrView, K::AutogradCUDA,
                                        K::AutogradCPU, K::AutocastCUDA, K::AutocastCPU});
    return tensor.defined() && keys.isSupersetOf(tensor.key_set()) && tensor.device() == device &&
           !tensor._fw_grad(0).defined();
}

// Whether a mode or a transform sees every operator of this thread.
bool watched() {
    const auto included = c10::impl::tls_local_dispatch_key_set().included_;
    return !c10::default_included_set.isSupersetOf(included);
}

bool launch(const Driver& driver, const Kernel& kernel) {
    auto parameters = const_cast<void**>(kernel.parameters.data());
    return driver.launch(kernel.config, kernel.function, parameters, nullptr) == 0;
}

// dx and dw, or nothing: not served. Not to be called with the GIL: it may wait for another call on
// the same stream, and a launch for room in the driver's queue.
std::optional<Results> serve(Store& store, const at::Tensor& dy, const at::Tensor& x,
                             const at::Tensor& rstd, const at::Tensor& weight) {
    if (!x.defined() || x.device().type() != store.device_type || watched()) return {};
    const auto device = x.device();
    for (const auto* tensor : {&dy, &x, &rstd, &weight})
        if (!plain(*tensor, device)) return {};
    if (weight.dim() != 1 || x.dim() < 1 || x.numel() == 0) return {};
    const int64_t columns = weight.size(0), rows = x.numel() / x.size(-1);
    if (x.size(-1) != columns || dy.sizes() != x.sizes() || rstd.numel() != rows) return {};
    if (dy.scalar_type() != x.scalar_type() || rstd.scalar_type() != at::kFloat) return {};
    if (!dense(x) || !dense(dy) || !dense(weight) || !rstd.is_contiguous()) return {};
    const auto at = [](const at::Tensor& tensor) {
        return reinterpret_cast<uint64_t>(tensor.const_data_ptr());
    };
    if ((at(x) | at(dy) | at(weight)) % NORMFORGE_ALIGNMENT) return {};

    const int index = device.has_index() ? device.index() : 0;
    int current = -1, capturing = 1;
    void* stream = nullptr;
    if (store.driver.current_device(&current) != 0 || current != index) return {};
    if (store.driver.current_stream(index, &stream) != 0) return {};
    Plan* plan = nullptr;
    {
        const Key key(index, stream, rows, columns, x.scalar_type(), weight.scalar_type());
        const std::lock_guard<std::mutex> lock(store.mutex);
        const auto found = store.plans.find(key);
        if (found == store.plans.end()) return {};
        plan = &found->second;
    }
    if (store.driver.is_capturing(stream, &capturing) != 0 || capturing != 0) return {};

    Results results{allocate(x.sizes(), x.strides(), x),
                    allocate(weight.sizes(), weight.strides(), weight)};
    const std::lock_guard<std::mutex> lock(plan->lane->mutex);
    if (plan->lane->paused) return {};
    const uint64_t addresses[] = {at(x),      at(dy),         at(rstd),
                                  at(weight), at(results[0]), at(results[1])};
    auto* block = reinterpret_cast<char*>(plan->block.data());
    std::memcpy(block, addresses, sizeof addresses);
    for (const auto offset : plan->scratch_at)
        std::memcpy(block + offset, &plan->lane->scratch, sizeof(uint64_t));
    // A refused launch is left to Python, which does the whole call again and raises the error.
    if (!launch(store.driver, plan->main)) return {};
    if (plan->second.function && !launch(store.driver, plan->second)) return {};
    return results;
}

}  // namespace NORMFORGE_NAMESPACE
