// Plans of native.cpp: what launches are made of, which calls they serve, and their launch.
//
// It is compiled against PyTorch's headers only. The driver's functions come as addresses, so that
// nothing here needs CUDA to be compiled, and tests can hand over functions of their own. Nothing
// here touches Python.

#pragma once

#include <atomic>
#include <cfloat>
#include <cstdint>
#include <cstring>
#include <initializer_list>
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

// block: the arguments of both kernels, which begin with what differs from call to call; the driver
// copies them before a launch returns. The lane's mutex guards it. A forward has a lane of its own,
// because it keeps nothing on the device.
struct Plan {
    Lane own;
    Lane* lane = nullptr;
    std::vector<uint64_t> block;
    std::vector<uint64_t> scratch_at;  // offsets in bytes
    Kernel main, second;
    std::atomic<uint64_t> calls = 0;  // that were launched, for whoever counts calls
};

enum Kind { kBackward, kForward, kAddForward };  // of calls, as plans.py numbers them

// Of a plan, its kind first.
using Key = std::tuple<int, int64_t, void*, int64_t, int64_t, at::ScalarType, at::ScalarType>;

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
    std::atomic<bool> retired = false;  // another package has taken the name of this one
};

using Results = std::vector<at::Tensor>;  // none at all: not served

at::Tensor allocate(at::IntArrayRef sizes, at::IntArrayRef strides, const at::Tensor& like,
                    at::ScalarType dtype) {
    // As Python does it: not filled with NaN in deterministic mode, because all of it is written.
#ifdef NORMFORGE_CUDA
    if (like.is_cuda())
        return at::detail::empty_strided_cuda(sizes, strides, dtype, like.device());
#endif
    return at::detail::empty_strided_cpu(sizes, strides, dtype);
}

at::Tensor allocate_like(const at::Tensor& dense) {
    return allocate(dense.sizes(), dense.strides(), dense, dense.scalar_type());
}

uint64_t address(const at::Tensor& tensor) {
    return reinterpret_cast<uint64_t>(tensor.const_data_ptr());
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

// The plan of a call with this weight and these rows, all of one shape and dtype; null: not served.
Plan* plan_of(Store& store, Kind kind, std::initializer_list<const at::Tensor*> all_rows,
              const at::Tensor& weight) {
    const auto& x = **all_rows.begin();
    if (!x.defined() || x.device().type() != store.device_type || watched()) return nullptr;
    const auto device = x.device();
    if (!plain(weight, device) || weight.dim() != 1 || !dense(weight)) return nullptr;
    uint64_t places = address(weight);
    for (const auto* rows : all_rows) {
        if (!plain(*rows, device) || rows->scalar_type() != x.scalar_type()) return nullptr;
        if (rows->sizes() != x.sizes() || !dense(*rows)) return nullptr;
        places |= address(*rows);
    }
    const int64_t columns = weight.size(0);
    if (x.dim() < 1 || x.numel() == 0 || x.size(-1) != columns) return nullptr;
    if (places % NORMFORGE_ALIGNMENT) return nullptr;

    const int index = device.has_index() ? device.index() : 0;
    int current = -1, capturing = 1;
    void* stream = nullptr;
    if (store.driver.current_device(&current) != 0 || current != index) return nullptr;
    if (store.driver.current_stream(index, &stream) != 0) return nullptr;
    Plan* plan = nullptr;
    {
        const std::lock_guard<std::mutex> lock(store.mutex);
        const Key key(kind, index, stream, x.numel() / columns, columns, x.scalar_type(),
                      weight.scalar_type());
        const auto found = store.plans.find(key);
        if (found == store.plans.end()) return nullptr;
        plan = &found->second;
    }
    if (store.driver.is_capturing(stream, &capturing) != 0 || capturing != 0) return nullptr;
    return plan;
}

// Launches a plan with these words at the beginning of its block. A refused launch is left to
// Python, which does the whole call again and raises the error.
template <size_t count>
bool launch(const Driver& driver, Plan& plan, const uint64_t (&words)[count]) {
    const std::lock_guard<std::mutex> lock(plan.lane->mutex);
    if (plan.lane->paused) return false;
    auto* block = reinterpret_cast<char*>(plan.block.data());
    std::memcpy(block, words, sizeof words);
    for (const auto offset : plan.scratch_at)
        std::memcpy(block + offset, &plan.lane->scratch, sizeof(uint64_t));
    for (const auto* kernel : {&plan.main, &plan.second}) {
        auto parameters = const_cast<void**>(kernel->parameters.data());
        if (kernel->function &&
            driver.launch(kernel->config, kernel->function, parameters, nullptr) != 0)
            return false;
    }
    plan.calls.fetch_add(1, std::memory_order_relaxed);
    return true;
}

// What follows is not to be called with the GIL: it may wait for another call on the same stream,
// and a launch for room in the driver's queue.

// dx and dw
Results serve_backward(Store& store, const at::Tensor& dy, const at::Tensor& x,
                       const at::Tensor& rstd, const at::Tensor& weight) {
    auto* plan = plan_of(store, kBackward, {&x, &dy}, weight);
    if (!plan || !plain(rstd, x.device()) || rstd.scalar_type() != at::kFloat) return {};
    if (rstd.numel() != x.numel() / x.size(-1) || !rstd.is_contiguous()) return {};
    Results results{allocate_like(x), allocate_like(weight)};
    const uint64_t words[] = {address(x),      address(dy),         address(rstd),
                              address(weight), address(results[0]), address(results[1])};
    return launch(store.driver, *plan, words) ? results : Results();
}

// y, rstd and with a residual the sum. residual: null for none. eps: none for that of fp32.
Results serve_forward(Store& store, const at::Tensor& x, const at::Tensor& weight,
                      const at::Tensor* residual, std::optional<double> eps, double offset) {
    auto* plan = residual ? plan_of(store, kAddForward, {&x, residual}, weight)
                          : plan_of(store, kForward, {&x}, weight);
    if (!plan) return {};
    auto sizes = x.sizes().vec(), strides = x.strides().vec();
    for (auto& stride : strides) stride /= x.size(-1);
    sizes.back() = strides.back() = 1;
    Results results{allocate_like(x), allocate(sizes, strides, x, at::kFloat)};
    uint64_t words[7] = {address(x), 0, address(weight), address(results[0]), address(results[1])};
    if (residual) {
        results.push_back(allocate_like(x));
        words[1] = address(*residual);
        words[5] = address(results[2]);
    }
    const float numbers[] = {float(eps.value_or(FLT_EPSILON)), float(offset)};
    std::memcpy(&words[6], numbers, sizeof numbers);
    return launch(store.driver, *plan, words) ? results : Results();
}

}  // namespace NORMFORGE_NAMESPACE
