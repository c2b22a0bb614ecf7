// A stand-in for libtorch's CUDA devices, for machines without a GPU: see README.md.
//
// libtorch finds a device by what a library registers when it is loaded: a guard (current device and streams), an allocator, hooks, and
// kernels for the dispatch key CUDA. These register there in place of libtorch_cuda.so, which must not be loaded beside them.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <shared_mutex>
#include <thread>
#include <tuple>
#include <utility>
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

// The stand-in for libcuda (crates/phalanx-nccl/tests/stand_in), whose streams are threads that do one job after the other.
extern "C" {
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;
int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(CUcontext *context, int device);
int cuCtxPushCurrent_v2(CUcontext context);
int cuCtxPopCurrent_v2(CUcontext *context);
int cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority);
int cuLaunchHostFunc(CUstream stream, void (*run)(void *), void *data);
int cuEventCreate(CUevent *event, unsigned flags);
int cuEventDestroy_v2(CUevent event);
int cuEventRecord(CUevent event, CUstream stream);
int cuEventQuery(CUevent event);
int cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);
int standin_await(CUstream stream);
void standin_foreign(void *(*elements)(const void *pointer, size_t bytes, int device));
}

void check(int code) { TORCH_CHECK(code == 0, "CUDA error: ", code, " of the stand-in"); }

// A device is this thread's current one for libcuda, until this is gone.
class Bound {
public:
    explicit Bound(DeviceIndex device) {
        static const std::vector<CUcontext> contexts = [] {
            check(cuInit(0));
            std::vector<CUcontext> contexts(devices());
            for (DeviceIndex index = 0; index < devices(); ++index) check(cuDevicePrimaryCtxRetain(&contexts[index], index));
            return contexts;
        }();
        check(cuCtxPushCurrent_v2(contexts.at(device)));
    }
    ~Bound() {
        CUcontext popped;
        cuCtxPopCurrent_v2(&popped);
    }
    Bound(const Bound &) = delete;
    Bound &operator=(const Bound &) = delete;
};

thread_local DeviceIndex current = 0;
thread_local StreamId streams[most_devices] = {};

// A device's streams, by libtorch's numbers. 0 is the default stream, which libcuda calls NULL.
class Streams {
public:
    StreamId make(DeviceIndex device) {
        const Bound bound(device);
        CUstream made;
        check(cuStreamCreateWithPriority(&made, 1, 0));
        std::lock_guard<std::mutex> lock(mutex);
        all[device].push_back(made);
        return static_cast<StreamId>(all[device].size());
    }
    CUstream native(DeviceIndex device, StreamId id) {
        std::lock_guard<std::mutex> lock(mutex);
        return id == 0 ? nullptr : all[device].at(static_cast<size_t>(id - 1));
    }
    StreamId count(DeviceIndex device) {
        std::lock_guard<std::mutex> lock(mutex);
        return static_cast<StreamId>(all[device].size());
    }

private:
    std::mutex mutex;
    std::vector<CUstream> all[most_devices];
};

Streams &all_streams() {
    static Streams &streams = *new Streams;
    return streams;
}

// Closed when the process ends: what is queued then is not carried out, since libtorch is no longer there.
class Gate {
public:
    void pass(const std::function<void()> &job) {
        std::shared_lock<std::shared_mutex> lock(mutex);
        if (!is_closed) job();
    }
    void close() {
        std::unique_lock<std::shared_mutex> lock(mutex);
        is_closed = true;
    }

private:
    std::shared_mutex mutex;
    bool is_closed = false;
};

Gate &gate() {
    static Gate &gate = *new Gate;
    return gate;
}

// libtorch was loaded before this library, and ends after it.
struct AtExit {
    ~AtExit() { gate().close(); }
};
[[maybe_unused]] const AtExit at_exit;

// Queues `job` on a stream, where it begins late: who does not wait for it, or for an event behind it, sees what was there before.
void queue(DeviceIndex device, StreamId id, std::chrono::microseconds delay, std::function<void()> job) {
    struct Late {
        std::chrono::microseconds delay;
        std::function<void()> job;
    };
    const auto run = [](void *data) {
        auto *const late = static_cast<Late *>(data);
        std::this_thread::sleep_for(late->delay);
        gate().pass([late] {
            late->job();
            delete late; // With its tensors.
        });
    };
    const Bound bound(device);
    check(cuLaunchHostFunc(all_streams().native(device, id), run, new Late{delay, std::move(job)}));
}

const std::chrono::microseconds late = [] {
    const char *asked = std::getenv("STANDIN_CUDA_LATE");
    return std::chrono::microseconds(asked ? std::atoi(asked) : 100);
}();
// Of a copy that its caller does not wait for.
constexpr std::chrono::milliseconds later(20);

void await(DeviceIndex device, StreamId id) {
    const Bound bound(device);
    check(standin_await(all_streams().native(device, id)));
}

// Waits for what this thread's current stream of a device has to do.
void settle(DeviceIndex device) { await(device, streams[device]); }

// While this is set, a thread carries out an operation on copies of its arguments, as no device does.
thread_local bool falls_back = false;

// The program's thread waits for a device, or a device for it: an error while the file exists that STANDIN_CUDA_NO_WAIT names.
void waits(const char *what) {
    static const char *const path = std::getenv("STANDIN_CUDA_NO_WAIT");
    TORCH_CHECK(falls_back || !path || access(path, F_OK) != 0, "CUDA error: ", what, ", which nobody is to wait for now");
}

// The memory of all devices: addresses that a program may not touch, as those of a real device, and as many bytes beside them, where the
// elements are. It begins with NaNs. When it is freed, it is used again in the order of the stream on which it was taken, as by libtorch's caching
// allocator, and has NaNs from there on.
class Memory {
public:
    Memory() { standin_foreign(&Memory::find); }

    void *allocate(size_t bytes, DeviceIndex device, StreamId stream) {
        const size_t size = (bytes + 511) / 512 * 512;
        std::lock_guard<std::mutex> lock(mutex);
        auto &same = unused[{size, device, stream}];
        char *place = addresses + used;
        if (!same.empty()) {
            place = same.back();
            same.pop_back();
        } else {
            TORCH_CHECK(size <= whole - used, "CUDA out of memory: the stand-in has ", whole, " B");
            used += size;
            std::memset(elements(place), 0xff, size);
        }
        blocks[place] = {size, device, stream};
        return place;
    }

    void release(void *place) {
        Block block;
        {
            std::lock_guard<std::mutex> lock(mutex);
            const auto found = blocks.find(static_cast<char *>(place));
            if (found == blocks.end()) std::abort(); // Freed twice, or never allocated.
            block = found->second;
            blocks.erase(found);
        }
        const auto [size, device, stream] = block;
        queue(device, stream, std::chrono::microseconds(0), [this, place, size = size] { std::memset(elements(place), 0xff, size); });
        std::lock_guard<std::mutex> lock(mutex);
        unused[block].push_back(static_cast<char *>(place));
    }

    // Where the bytes of an address are.
    char *elements(const void *address) const { return bytes + (static_cast<const char *>(address) - addresses); }

private:
    using Block = std::tuple<size_t, DeviceIndex, StreamId>;

    // For the other stand-ins: where these bytes of a device are.
    static void *find(const void *address, size_t size, int device);

    static char *reserve(int access) {
        void *place = mmap(nullptr, whole, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (place == MAP_FAILED) throw std::bad_alloc();
        return static_cast<char *>(place);
    }

    static constexpr size_t whole = size_t{1} << 34;
    std::mutex mutex;
    std::map<Block, std::vector<char *>> unused;
    std::map<char *, Block> blocks;
    size_t used = 0;
    char *const addresses = reserve(PROT_NONE);
    char *const bytes = reserve(PROT_READ | PROT_WRITE);
};

// Never destroyed: tensors of static variables are freed when the process ends.
Memory &memory() {
    static Memory &memory = *new Memory;
    return memory;
}

void *Memory::find(const void *address, size_t size, int device) {
    auto &memory = ::memory();
    std::lock_guard<std::mutex> lock(memory.mutex);
    auto after = memory.blocks.upper_bound(const_cast<char *>(static_cast<const char *>(address)));
    if (after == memory.blocks.begin()) return nullptr;
    const auto &[place, block] = *--after;
    const auto offset = static_cast<size_t>(static_cast<const char *>(address) - place);
    const bool is_there = offset <= std::get<0>(block) && size <= std::get<0>(block) - offset && std::get<1>(block) == device;
    return is_there ? memory.elements(address) : nullptr;
}

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
    Stream getNewStream(Device device, int) const override { return stream(device, all_streams().make(index(device))); }
    Stream exchangeStream(Stream next) const override {
        const Stream before = getStream(next.device());
        streams[next.device_index()] = next.id();
        return before;
    }
    void *getStreamNativeHandle(const Stream stream) const override {
        return all_streams().native(stream.device_index(), stream.id());
    }
    bool queryStream(const Stream &stream) const override {
        synchronizeStream(stream);
        return true;
    }
    void synchronizeStream(const Stream &stream) const override { await(stream.device_index(), stream.id()); }
    void synchronizeDevice(const DeviceIndex device) const override {
        for (StreamId id = 0; id <= all_streams().count(device); ++id) await(device, id);
    }

    void record(void **event, const Stream &stream, const DeviceIndex, const c10::EventFlag) const override {
        const Bound bound(stream.device_index());
        auto *native = static_cast<CUevent>(*event);
        if (!native) check(cuEventCreate(&native, 2));
        *event = native;
        check(cuEventRecord(native, all_streams().native(stream.device_index(), stream.id())));
    }
    void block(void *event, const Stream &stream) const override {
        if (!event) return;
        const Bound bound(stream.device_index());
        check(cuStreamWaitEvent(all_streams().native(stream.device_index(), stream.id()), static_cast<CUevent>(event), 0));
    }
    bool queryEvent(void *event) const override {
        const Bound bound(current);
        return !event || cuEventQuery(static_cast<CUevent>(event)) == 0;
    }
    void synchronizeEvent(void *event) const override {
        while (!queryEvent(event)) std::this_thread::sleep_for(late);
    }
    void destroyEvent(void *event, const DeviceIndex) const noexcept override {
        if (event) cuEventDestroy_v2(static_cast<CUevent>(event));
    }
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
        void *place = bytes ? memory().allocate(bytes, current, streams[current]) : nullptr;
        return {place, place, &release, Device(c10::kCUDA, current)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void *to, const void *from, size_t bytes) const override {
        settle(current);
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
    void deviceSynchronize(DeviceIndex device) const override { Guard().synchronizeDevice(device); }
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
    if (!non_blocking && to.is_cuda() != from.is_cuda()) waits(to.is_cuda() ? "a copy to a device" : "a copy from a device");
    if (!to.is_cuda() && !non_blocking) {
        settle(from.device().index());
        elements(to).copy_(elements(from));
        return;
    }
    const auto device = to.is_cuda() ? to.device().index() : from.device().index();
    if (from.is_cuda() && from.device().index() != device) settle(from.device().index());
    // Ordinary memory of this machine may be changed when the call returns. That of a device is used again in the order of its stream.
    const Tensor source = from.is_cuda() || non_blocking ? elements(from) : from.clone();
    const bool is_later = non_blocking && to.is_cuda() != from.is_cuda();
    queue(device, streams[device], is_later ? std::chrono::microseconds(later) : late,
          [to = elements(to), source] { to.copy_(source); });
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
    waits("an element of a device");
    settle(self.device().index());
    return elements(self).item();
}

void record_stream(Tensor &, Stream) {}

// It changes the running statistics, which its schema does not say, so that they would be lost with the copies below.
std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor &input, const std::optional<Tensor> &weight, const std::optional<Tensor> &bias,
                                              const std::optional<Tensor> &mean, const std::optional<Tensor> &variance, bool training,
                                              double momentum, double epsilon) {
    settle(input.device().index());
    const auto here = [](const std::optional<Tensor> &tensor) {
        return tensor && tensor->defined() ? std::optional<Tensor>(elements(*tensor)) : std::nullopt;
    };
    const auto [output, saved_mean, saved_inverse] = at::native_batch_norm(
        elements(input), here(weight), here(bias), here(mean), here(variance), training, momentum, epsilon);
    const auto device = input.device();
    return {output.to(device), saved_mean.to(device), saved_inverse.to(device)};
}

// As before libtorch's kernels for CUDA: the arguments of an operation that are on a device are on the same one. On copies of them the operation
// would succeed.
void check_devices(at::ArrayRef<c10::IValue> arguments) {
    std::optional<Device> device;
    const auto add = [&device](const Tensor &tensor) {
        if (!tensor.defined() || !tensor.is_cuda()) return;
        TORCH_CHECK(!device || *device == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
                    device.value_or(tensor.device()), " and ", tensor.device());
        device = tensor.device();
    };
    for (const c10::IValue &argument : arguments) {
        if (argument.isTensor()) {
            add(argument.toTensor());
        } else if (argument.isTensorList()) {
            for (const Tensor &tensor : argument.toTensorVector()) add(tensor);
        }
    }
}

// All other operations: on copies of their arguments, with the kernels of processors.
void fall_back(const c10::OperatorHandle &operation, torch::jit::Stack *stack) {
    check_devices(torch::jit::last(*stack, operation.schema().arguments().size()));
    const bool before = std::exchange(falls_back, true);
    try {
        at::native::cpu_fallback(operation, stack);
    } catch (...) {
        falls_back = before;
        throw;
    }
    falls_back = before;
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
