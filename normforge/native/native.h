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
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
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

// block: the arguments of both kernels; the driver copies them before a launch returns. The lane's
// mutex guards it. A plan without scratch, such as a forward's, has a lane of its own, because it
// keeps nothing on the device. Offsets are in bytes: of the tensors that a call takes and gives, and
// of its numbers.
struct Plan {
    Lane own;
    Lane* lane = nullptr;
    std::vector<uint64_t> block;
    std::vector<uint64_t> places, scratch_at;
    Kernel main, second;
    std::atomic<uint64_t> calls = 0;  // that were launched, for whoever counts calls
};

// A kind of call, as kinds.py describes it. operation: the operator that makes such calls. names: of
// the tensors that it takes. given, made: the roles of these, and of the tensors that it gives: X for
// M rows of N elements, r for one fp32 number of each row, w for N elements that all rows share, 1 or
// 2 for sums over the rows, so many of every column. numbers: the names of what it takes by value.
struct Kind {
    std::string operation;
    std::vector<std::string> names;
    std::string given, made;
    std::vector<std::string> numbers;
};

// The kinds of a norm: its backward, and its forward, also with a third tensor (a bias, a residual).
enum { kBackward, kForward, kForwardOfThree, kKinds };

// Of a plan, its kind first.
using Key = std::tuple<int, int64_t, void*, int64_t, int64_t, at::ScalarType, at::ScalarType>;

// The plans of one package. Like its operators it stays for the life of the process, and with it
// all that it points to: nodes of a graph may outlive the package's module.
struct Store {
    Driver driver{};
    at::DeviceType device_type = at::kCUDA;
    Kind kinds[kKinds];
    // (x, weight, the bias of a norm that has one, numbers) -> what the forward gives
    PyObject* forward = nullptr;
    // (dy, x, weight, rstd, the mean of a norm that has one, numbers, and whether each of the
    // results is wanted) -> gradients of x, weight, bias
    PyObject* gradients = nullptr;
    std::mutex mutex;  // of the maps; what is in them is never taken out
    std::map<Key, Plan> plans;
    std::map<std::pair<int64_t, void*>, Lane> lanes;
    std::atomic<bool> retired = false;  // another package has taken the name of this one
    bool with_bias() const { return kinds[kForwardOfThree].given.back() == 'w'; }
};

using Given = c10::SmallVector<const at::Tensor*, 6>;
using Numbers = c10::ArrayRef<float>;
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

// What all rows of a call share; null where they share nothing.
const at::Tensor* shared(const Kind& kind, const Given& given) {
    const auto at = kind.given.find('w');
    return at == std::string::npos ? nullptr : given[at];
}

// The plan of a call whose tensors, the first of which are rows, are those of its kind, dense and
// aligned; null: not served.
Plan* plan_of(Store& store, int which, const Given& given) {
    const auto& kind = store.kinds[which];
    const auto& x = *given[0];
    if (!x.defined() || x.device().type() != store.device_type || watched()) return nullptr;
    if (x.dim() < 1 || x.numel() == 0) return nullptr;
    const auto device = x.device();
    const int64_t columns = x.size(-1), rows = x.numel() / columns;
    const auto* weight = shared(kind, given);
    uint64_t places = 0;
    for (size_t i = 0; i < given.size(); ++i) {
        const auto& one = *given[i];
        if (!plain(one, device)) return nullptr;
        if (kind.given[i] == 'r') {
            if (one.scalar_type() != at::kFloat || one.numel() != rows || !one.is_contiguous())
                return nullptr;
            continue;
        }
        const auto& like = kind.given[i] == 'X' ? x : *weight;
        const bool fits = kind.given[i] == 'X' ? one.sizes() == x.sizes()
                                               : one.dim() == 1 && one.size(0) == columns;
        if (!fits || one.scalar_type() != like.scalar_type() || !dense(one)) return nullptr;
        places |= address(one);
    }
    if (places % NORMFORGE_ALIGNMENT) return nullptr;

    const int index = device.has_index() ? device.index() : 0;
    int current = -1, capturing = 1;
    void* stream = nullptr;
    if (store.driver.current_device(&current) != 0 || current != index) return nullptr;
    if (store.driver.current_stream(index, &stream) != 0) return nullptr;
    Plan* plan = nullptr;
    {
        const std::lock_guard<std::mutex> lock(store.mutex);
        const Key key(which, index, stream, rows, columns, x.scalar_type(),
                      (weight ? *weight : x).scalar_type());
        const auto found = store.plans.find(key);
        if (found == store.plans.end()) return nullptr;
        plan = &found->second;
    }
    if (store.driver.is_capturing(stream, &capturing) != 0 || capturing != 0) return nullptr;
    return plan;
}

// Launches a plan with these addresses and numbers. A refused launch is left to Python, which does
// the whole call again and raises the error.
bool launch(const Driver& driver, Plan& plan, c10::ArrayRef<uint64_t> addresses, Numbers numbers) {
    const std::lock_guard<std::mutex> lock(plan.lane->mutex);
    if (plan.lane->paused) return false;
    auto* block = reinterpret_cast<char*>(plan.block.data());
    const auto* at = plan.places.data();
    for (const auto& value : addresses) std::memcpy(block + *at++, &value, sizeof value);
    for (const auto& value : numbers) std::memcpy(block + *at++, &value, sizeof value);
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

// A tensor of a role that a call with these rows gives.
at::Tensor make(char role, const at::Tensor& x, const at::Tensor& weight) {
    if (role == 'X') return allocate_like(x);
    if (role == 'r') {
        auto sizes = x.sizes().vec(), strides = x.strides().vec();
        for (auto& stride : strides) stride /= x.size(-1);
        sizes.back() = strides.back() = 1;
        return allocate(sizes, strides, x, at::kFloat);
    }
    const int64_t sizes[] = {role - '0', x.size(-1)}, strides[] = {x.size(-1), 1};
    const size_t skipped = role == '1';
    return allocate({sizes + skipped, 2 - skipped}, {strides + skipped, 2 - skipped}, x,
                    weight.scalar_type());
}

// What a call gives. Not to be called with the GIL: it may wait for another call on the same stream,
// and a launch for room in the driver's queue.
Results serve(Store& store, int which, const Given& given, Numbers numbers) {
    auto* plan = plan_of(store, which, given);
    if (!plan) return {};
    const auto& kind = store.kinds[which];
    const auto* weight = shared(kind, given);
    Results results;
    results.reserve(kind.made.size());
    for (const char role : kind.made)
        results.push_back(make(role, *given[0], weight ? *weight : *given[0]));
    c10::SmallVector<uint64_t, 12> addresses;
    for (const auto* tensor : given) addresses.push_back(address(*tensor));
    for (const auto& result : results) addresses.push_back(address(result));
    if (!launch(store.driver, *plan, addresses, numbers)) results.clear();
    return results;
}

}  // namespace NORMFORGE_NAMESPACE
