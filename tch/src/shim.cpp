// What libtorch has and tch does not pass on: hooks that run when a gradient is finished, tensors in memory of others, fused
// optimizers, and an operation of our own. `shim.rs` has the other side of each function.
//
// A function that can fail returns its error as a string, to be freed by phx_free; null is success. No exception leaves it.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Something of Rust's, dropped once.
class Owned {
public:
    Owned(void *context, void (*drop)(void *)) : context(context), drop(drop) {}
    Owned(const Owned &) = delete;
    Owned &operator=(const Owned &) = delete;
    ~Owned() { drop(context); }

    void *const context;

private:
    void (*const drop)(void *);
};

// Drops `context` also if there is no memory for it.
std::unique_ptr<Owned> take(void *context, void (*drop)(void *)) {
    try {
        return std::make_unique<Owned>(context, drop);
    } catch (...) {
        drop(context);
        throw;
    }
}

// Without memory for another message; not freed.
char no_memory[] = "there is no memory";

char *copy(const char *text, size_t length) noexcept {
    char *copied = strndup(text, length);
    return copied ? copied : no_memory;
}

class GradientHook final : public torch::autograd::PostAccumulateGradHook {
public:
    GradientHook(void (*ready)(void *), std::unique_ptr<Owned> target) : ready(ready), target(std::move(target)) {}

    void operator()(const Variable &) override { ready(target->context); }

private:
    void (*const ready)(void *);
    const std::unique_ptr<Owned> target;
};

// What a thread has while it takes part in a backward pass that a `Ddp` runs: the thread that runs it, and those of libtorch, such as a
// device's, on which a part of it runs. libtorch gives them the state of the thread that began the pass (at::ThreadLocalState), but not
// a thread-local variable of the program.
constexpr std::string_view of_ddp_name = "PHALANX_DDP_BACKWARD";
const c10::DebugInfoKind of_ddp(&of_ddp_name);

// Memory of this machine, row by row, as a tensor of the size and type of `like`.
at::Tensor here(const at::Tensor &like, void *data) {
    return at::from_blob(data, like.sizes(), at::TensorOptions().dtype(like.scalar_type()).device(at::kCPU));
}

// Sums doubles over the ranks. On a device a node of the graph runs on the device's thread, in the order in which that takes them: so do the
// hooks, and collectives of a backward pass begin in one order on every rank.
struct Exchange final : torch::CustomClassHolder {
    Exchange(void (*sum)(void *, double *, size_t), std::unique_ptr<Owned> group) : sum(sum), group(std::move(group)) {}

    Variable operator()(const Variable &values) const {
        auto sums = values.to(at::kCPU, values.scalar_type(), false, true, at::MemoryFormat::Contiguous);
        sum(group->context, sums.data_ptr<double>(), static_cast<size_t>(sums.numel()));
        return sums.to(values.device());
    }

    void (*const sum)(void *, double *, size_t);
    const std::unique_ptr<Owned> group;
};

// The sum over ranks. Each rank's loss is a part of the whole one, so that the gradient is the sum over ranks, too.
struct SumOverRanks final : torch::autograd::Function<SumOverRanks> {
    static Variable forward(AutogradContext *context, const Variable &values, c10::intrusive_ptr<Exchange> exchange) {
        auto sums = (*exchange)(values);
        context->saved_data["exchange"] = c10::IValue::make_capsule(std::move(exchange));
        return sums;
    }

    static variable_list backward(AutogradContext *context, variable_list gradients) {
        auto held = context->saved_data["exchange"].toCapsule();
        auto exchange = c10::static_intrusive_pointer_cast<Exchange>(std::move(held));
        // Applied, so that the gradient of the gradient has the sum, too.
        return {SumOverRanks::apply(gradients[0], std::move(exchange)), Variable()};
    }
};

template <typename Body> char *guarded(Body body) noexcept {
    const char *cause = "an unknown exception";
    try {
        body();
        return nullptr;
    } catch (const std::exception &error) {
        // Without the stack, which follows in further lines.
        const char *text = error.what();
        const char *end = std::strchr(text, '\n');
        return copy(text, end ? static_cast<size_t>(end - text) : std::strlen(text));
    } catch (...) {
        return copy(cause, std::strlen(cause));
    }
}

std::vector<at::Tensor> list(at::Tensor *const *tensors, size_t count) {
    std::vector<at::Tensor> list;
    list.reserve(count);
    for (size_t index = 0; index < count; ++index) list.push_back(*tensors[index]);
    return list;
}

} // namespace

extern "C" {

void phx_free(char *error) {
    if (error != no_memory) std::free(error);
}

// The same number for each handle of one tensor.
uintptr_t phx_identity(const at::Tensor *tensor) noexcept {
    return reinterpret_cast<uintptr_t>(tensor->unsafeGetTensorImpl());
}

bool phx_is_plain(const at::Tensor *tensor) noexcept {
    try {
        return tensor->layout() == at::kStrided && (tensor->is_cpu() || tensor->is_cuda()) && tensor->has_storage() &&
               !tensor->is_nested() && !tensor->is_neg() && !tensor->is_conj();
    } catch (...) {
        return false;
    }
}

bool phx_is_here(const at::Tensor *tensor) noexcept {
    try {
        return tensor->is_cpu();
    } catch (...) {
        return false;
    }
}

// Whether `gradient` may be overwritten to become another gradient of `leaf`: it is like that, and no other tensor has its memory.
bool phx_may_become(const at::Tensor *gradient, const at::Tensor *leaf) noexcept {
    try {
        return phx_is_plain(gradient) && gradient->device() == leaf->device() && gradient->scalar_type() == leaf->scalar_type() &&
               gradient->sizes() == leaf->sizes() && gradient->is_non_overlapping_and_dense() &&
               gradient->storage().use_count() == 1;
    } catch (...) {
        return false;
    }
}

// Copies the elements of a plain tensor to `data`, row by row, after what the current stream of its device has to do.
char *phx_read(const at::Tensor *tensor, void *data) {
    return guarded([&] {
        c10::NoGradGuard guard;
        here(*tensor, data).copy_(*tensor);
    });
}

// Copies `data`, row by row, to a plain tensor, after what the current stream of its device has to do. As for memory of this machine,
// autograd does not count it as a change.
char *phx_write(const at::Tensor *tensor, void *data) {
    return guarded([&] {
        c10::NoGradGuard guard;
        tensor->data().copy_(here(*tensor, data));
    });
}

// Copies each of `from` to the tensor of `to` at its place, on a device by few kernels.
char *phx_copy_all(at::Tensor *const *to, at::Tensor *const *from, size_t count) {
    return guarded([&] {
        c10::NoGradGuard guard;
        if (count != 0) at::_foreach_copy_(list(to, count), list(from, count));
    });
}

// The current stream of the tensor's device uses its memory: when it is freed, nobody gets it before what is queued there now is done.
char *phx_used_here(const at::Tensor *tensor) {
    return guarded([&] {
        if (!tensor->is_cuda()) return;
        const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
        tensor->record_stream(guard.getStream(tensor->device()));
    });
}

// The calling thread's current stream of CUDA device `index`: what libtorch queues here next goes there.
char *phx_current_stream(int32_t index, void **stream) {
    return guarded([&] {
        const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
        const auto current = guard.getStream(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index)));
        *stream = guard.getStreamNativeHandle(current);
    });
}

// The bytes from a plain tensor's first element to the end of its memory.
size_t phx_storage_bytes(const at::Tensor *tensor) noexcept {
    try {
        const size_t offset = static_cast<size_t>(tensor->storage_offset()) * tensor->element_size();
        const size_t whole = tensor->storage().nbytes();
        return whole > offset ? whole - offset : 0;
    } catch (...) {
        return 0;
    }
}

// Calls `ready` with `context` whenever backward has finished the gradient of a leaf, until phx_unhook. Takes `context`.
char *phx_hook(const at::Tensor *leaf, void (*ready)(void *), void *context, void (*drop)(void *)) {
    return guarded([&] {
        auto target = take(context, drop);
        TORCH_CHECK(!torch::autograd::impl::post_acc_grad_hooks(*leaf), "its gradients are reported elsewhere already");
        auto hook = std::make_unique<GradientHook>(ready, std::move(target));
        torch::autograd::impl::set_post_acc_grad_hooks(*leaf, std::move(hook));
    });
}

// Marks the backward passes that this thread begins as those of a `Ddp`, until phx_unmark on this thread, in reverse order.
char *phx_mark(c10::DebugInfoGuard **mark) {
    return guarded([&] { *mark = new c10::DebugInfoGuard(of_ddp, std::make_shared<c10::DebugInfoBase>()); });
}

void phx_unmark(c10::DebugInfoGuard *mark) noexcept { delete mark; }

bool phx_is_marked() noexcept { return c10::ThreadLocalDebugInfo::get(of_ddp) != nullptr; }

char *phx_unhook(const at::Tensor *leaf) {
    return guarded([&] { torch::autograd::impl::set_post_acc_grad_hooks(*leaf, nullptr); });
}

// `gradient` may be null: then there is none any more.
char *phx_set_gradient(const at::Tensor *leaf, const at::Tensor *gradient) {
    return guarded([&] { leaf->mutable_grad() = gradient ? *gradient : at::Tensor(); });
}

// A tensor like `like`, row by row at `data`. Takes `keeper`, which is dropped with the last use of the memory.
char *phx_view(const at::Tensor *like, void *data, void *keeper, void (*drop)(void *), at::Tensor **view) {
    return guarded([&] {
        std::shared_ptr<Owned> held = take(keeper, drop);
        auto options = like->options().requires_grad(false).memory_format(std::nullopt);
        *view = new at::Tensor(at::from_blob(data, like->sizes(), [held](void *) mutable { held.reset(); }, options));
    });
}

// Takes `context`.
char *phx_sum_over_ranks(const at::Tensor *values, void (*sum)(void *, double *, size_t), void *context,
                         void (*drop)(void *), at::Tensor **sums) {
    return guarded([&] {
        auto group = take(context, drop);
        auto exchange = c10::make_intrusive<Exchange>(sum, std::move(group));
        *sums = new at::Tensor(SumOverRanks::apply(*values, std::move(exchange)));
    });
}

char *phx_fused_adamw(at::Tensor *const *parameters, at::Tensor *const *gradients, at::Tensor *const *firsts,
                      at::Tensor *const *seconds, at::Tensor *const *steps, size_t count, double rate, double beta_1,
                      double beta_2, double weight_decay, double epsilon) {
    return guarded([&] {
        at::_fused_adamw_(list(parameters, count), list(gradients, count), list(firsts, count), list(seconds, count),
                          {}, list(steps, count), rate, beta_1, beta_2, weight_decay, epsilon, false, false);
    });
}

// `velocities` may be null: then there is no momentum.
char *phx_fused_sgd(at::Tensor *const *parameters, at::Tensor *const *gradients, at::Tensor *const *velocities,
                    size_t count, double rate, double momentum, double weight_decay, bool nesterov) {
    return guarded([&] {
        at::_fused_sgd_(list(parameters, count), list(gradients, count), list(velocities, velocities ? count : 0),
                        weight_decay, momentum, rate, 0.0, nesterov, false, false);
    });
}
}
