// A stand-in for libtorch's CUDA devices, for machines without a GPU: see README.md.
//
// libtorch finds a device by what a library registers when it is loaded: a guard (current device and streams), an allocator, hooks, and
// kernels for the dispatch key CUDA. These register there in place of libtorch_cuda.so, which must not be loaded beside them.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <thread>
#include <unordered_map>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

constexpr DeviceIndex most_devices = 16;

DeviceIndex devices() {
    static const DeviceIndex count = [] {
        const char *asked = std::getenv("STANDIN_CUDA_DEVICES");
        const int count = asked ? std::atoi(asked) : 8;
        return static_cast<DeviceIndex>(std::clamp<int>(count, 1, most_devices));
    }();
    return count;
}

// The memory of all devices: addresses that a program may not touch, as those of a real device, and as many bytes beside them, where the
// elements are. It begins with NaNs, and so it does when it is used again.
class Memory {
public:
    void *allocate(size_t bytes) {
        const size_t size = (bytes + 511) / 512 * 512;
        std::lock_guard<std::mutex> lock(mutex);
        auto &same = unused[size];
        char *place = addresses + used;
        if (!same.empty()) {
            place = same.back();
            same.pop_back();
        } else {
            TORCH_CHECK(size <= whole - used, "CUDA out of memory: the stand-in has ", whole, " B");
            used += size;
        }
        sizes[place] = size;
        std::memset(elements(place), 0xff, size);
        return place;
    }

    void release(void *place) {
        std::lock_guard<std::mutex> lock(mutex);
        const auto found = sizes.find(static_cast<char *>(place));
        if (found == sizes.end()) std::abort(); // Freed twice, or never allocated.
        std::memset(elements(place), 0xff, found->second);
        unused[found->second].push_back(found->first);
        sizes.erase(found);
    }

    // Where the bytes of an address are.
    char *elements(const void *address) const { return bytes + (static_cast<const char *>(address) - addresses); }

private:
    static char *reserve(int access) {
        void *place = mmap(nullptr, whole, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (place == MAP_FAILED) throw std::bad_alloc();
        return static_cast<char *>(place);
    }

    static constexpr size_t whole = size_t{1} << 34;
    std::mutex mutex;
    std::map<size_t, std::vector<char *>> unused;
    std::unordered_map<char *, size_t> sizes;
    size_t used = 0;
    char *const addresses = reserve(PROT_NONE);
    char *const bytes = reserve(PROT_READ | PROT_WRITE);
};

// Never destroyed: tensors of static variables are freed when the process ends.
Memory &memory() {
    static Memory &memory = *new Memory;
    return memory;
}

// Copies between a device and this machine that their caller does not wait for. They are made late, in their order.
class Pending {
public:
    void add(std::function<void()> copy) {
        std::lock_guard<std::mutex> lock(mutex);
        copies.push_back(std::move(copy));
        if (copies.size() == 1) std::thread([this] { run(); }).detach();
    }

    // Waits for all of them. What comes later on a device does so.
    void settle() {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return copies.empty(); });
    }

private:
    void run() {
        std::unique_lock<std::mutex> lock(mutex);
        while (!copies.empty()) {
            const auto copy = copies.front();
            lock.unlock();
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            copy();
            lock.lock();
            copies.pop_front();
        }
        changed.notify_all();
    }

    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> copies;
};

Pending &pending() {
    static Pending &pending = *new Pending;
    return pending;
}

thread_local DeviceIndex current = 0;
thread_local StreamId streams[most_devices] = {};

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return c10::kCUDA; }

    Device exchangeDevice(Device device) const override {
        const Device before(c10::kCUDA, current);
        setDevice(device);
        return before;
    }
    Device getDevice() const override { return Device(c10::kCUDA, current); }
    void setDevice(Device device) const override {
        TORCH_CHECK(device.index() < devices(), "CUDA error: invalid device ordinal");
        uncheckedSetDevice(device);
    }
    void uncheckedSetDevice(Device device) const noexcept override {
        if (device.has_index()) current = device.index();
    }
    DeviceIndex deviceCount() const noexcept override { return devices(); }

    Stream getStream(Device device) const override { return stream(device, streams[index(device)]); }
    Stream getDefaultStream(Device device) const override { return stream(device, 0); }
    Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
    Stream getNewStream(Device device, int) const override {
        static std::atomic<StreamId> last{0};
        return stream(device, ++last);
    }
    Stream exchangeStream(Stream next) const override {
        const Stream before = getStream(next.device());
        streams[next.device_index()] = next.id();
        return before;
    }
    void *getStreamNativeHandle(const Stream stream) const override {
        return reinterpret_cast<void *>(0x1000 + 0x100 * stream.device_index() + stream.id());
    }
    bool queryStream(const Stream &) const override { return true; }
    void synchronizeStream(const Stream &) const override { pending().settle(); }
    void synchronizeDevice(const DeviceIndex) const override { pending().settle(); }

    // A kernel is done when the call that began it returns, and so nothing waits for another stream.
    void record(void **event, const Stream &, const DeviceIndex, const c10::EventFlag) const override { *event = &streams; }
    void block(void *, const Stream &) const override {}
    bool queryEvent(void *) const override { return true; }
    void synchronizeEvent(void *) const override { pending().settle(); }
    void destroyEvent(void *, const DeviceIndex) const noexcept override {}
    void recordDataPtrOnStream(const c10::DataPtr &, const Stream &) const override {}

private:
    static DeviceIndex index(Device device) { return device.has_index() ? device.index() : current; }
    static Stream stream(Device device, StreamId id) {
        return Stream(Stream::UNSAFE, Device(c10::kCUDA, index(device)), id);
    }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Allocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        void *place = bytes ? memory().allocate(bytes) : nullptr;
        return {place, place, &release, Device(c10::kCUDA, current)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void *to, const void *from, size_t bytes) const override {
        std::memcpy(memory().elements(to), memory().elements(from), bytes);
    }
    static void release(void *place) {
        if (place) memory().release(place);
    }
};
Allocator allocator;
[[maybe_unused]] const bool is_set = (c10::SetAllocator(c10::kCUDA, &allocator, 1), true);

struct CUDAHooks final : at::CUDAHooksInterface {
    explicit CUDAHooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasCUDA() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return devices(); }
    int getNumGPUs() const override { return devices(); }
    DeviceIndex current_device() const override { return current; }
    DeviceIndex getCurrentDevice() const override { return current; }
    void setCurrentDevice(DeviceIndex device) const override { current = device; }
    DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current, device); }
    DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return std::exchange(current, device); }
    c10::Allocator *getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
    c10::Allocator *getCUDADeviceAllocator() const override { return &allocator; }
    Device getDeviceFromPtr(void *) const override { return Device(c10::kCUDA, current); }
    const at::Generator &getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
    void deviceSynchronize(DeviceIndex) const override { pending().settle(); }
};
// The macro names the class within this namespace.
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

// The elements of a tensor of whatever device, for the kernels of processors.
Tensor elements(const Tensor &tensor) {
    if (!tensor.is_cuda()) return tensor;
    if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
    auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
    return at::from_blob(memory().elements(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options);
}

void transfer(const Tensor &to, const Tensor &from, bool non_blocking) {
    pending().settle();
    if (non_blocking && to.is_cuda() != from.is_cuda()) {
        pending().add([to, from] { elements(to).copy_(elements(from)); });
    } else {
        elements(to).copy_(elements(from));
    }
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
    const c10::OptionalDeviceGuard guard(device);
    return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                     type.value_or(at::kFloat), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef strides, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
    const c10::OptionalDeviceGuard guard(device);
    return at::detail::empty_strided_generic(size, strides, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                             type.value_or(at::kFloat));
}

Tensor &copy_(Tensor &self, const Tensor &from, bool non_blocking) {
    transfer(self, from, non_blocking);
    return self;
}

Tensor copy_from(const Tensor &self, const Tensor &to, bool non_blocking) {
    transfer(to, self, non_blocking);
    return to;
}

const Tensor &resize_(const Tensor &self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
    const size_t bytes = static_cast<size_t>(c10::multiply_integers(size)) * self.itemsize();
    auto *storage = self.storage().unsafeGetStorageImpl();
    if (bytes > storage->nbytes()) {
        const c10::OptionalDeviceGuard guard(self.device());
        auto grown = allocator.allocate(bytes);
        if (storage->nbytes() != 0) allocator.copy_data(grown.get(), storage->data(), storage->nbytes());
        storage->set_data_ptr_noswap(std::move(grown));
        storage->set_nbytes(bytes);
    }
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    return self;
}

Tensor copy_from_and_resize(const Tensor &self, const Tensor &to) {
    if (to.sizes() != self.sizes()) to.resize_(self.sizes());
    return copy_from(self, to, false);
}

at::Scalar item(const Tensor &self) {
    pending().settle();
    return elements(self).item();
}

void record_stream(Tensor &, Stream) {}

// It changes the running statistics, which its schema does not say, so that they would be lost with the copies below.
std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor &input, const std::optional<Tensor> &weight, const std::optional<Tensor> &bias,
                                              const std::optional<Tensor> &mean, const std::optional<Tensor> &variance, bool training,
                                              double momentum, double epsilon) {
    pending().settle();
    const auto here = [](const std::optional<Tensor> &tensor) {
        return tensor && tensor->defined() ? std::optional<Tensor>(elements(*tensor)) : std::nullopt;
    };
    const auto [output, saved_mean, saved_inverse] = at::native_batch_norm(
        elements(input), here(weight), here(bias), here(mean), here(variance), training, momentum, epsilon);
    const auto device = input.device();
    return {output.to(device), saved_mean.to(device), saved_inverse.to(device)};
}

// All other operations: on copies of their arguments, with the kernels of processors.
void fall_back(const c10::OperatorHandle &operation, torch::jit::Stack *stack) {
    pending().settle();
    at::native::cpu_fallback(operation, stack);
}

} // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
    library.impl("empty.memory_format", empty);
    library.impl("empty_strided", empty_strided);
    library.impl("as_strided", at::native::as_strided_tensorimpl);
    library.impl("view", at::native::view);
    library.impl("_reshape_alias", at::native::_reshape_alias);
    library.impl("unfold", at::native::unfold);
    library.impl("copy_", copy_);
    library.impl("_copy_from", copy_from);
    library.impl("_copy_from_and_resize", copy_from_and_resize);
    library.impl("resize_", resize_);
    library.impl("_local_scalar_dense", item);
    library.impl("record_stream", record_stream);
    library.impl("native_batch_norm", batch_norm);
}
