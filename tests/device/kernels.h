// The kernels: CPU kernels over CPU tensors that alias device memory.

#pragma once

#include "backend.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>

namespace {

// ------------------------------------------------- CPU views of device memory

bool on_device(const at::Tensor& t) { return t.defined() && t.device().type() == kType; }

void copy_geometry(const at::Tensor& to, const at::Tensor& from) {
  to.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides(),
                                                  from.storage_offset());
}

void copy_flags(const at::Tensor& to, const at::Tensor& from) {
  to._set_conj(from.is_conj());
  to._set_neg(from.is_neg());
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) {
    to.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
}

at::Tensor like(const at::Tensor& t, c10::Device device) {
  return at::empty_strided(t.sizes(), t.strides(),
                           t.options().device(device).pinned_memory(false));
}

// Grows the storage of a tensor that is about to get this shape.
void make_room(const at::Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto offset = t.storage_offset();
  auto needed = stride.data()
      ? at::detail::computeStorageNbytes(size, stride, t.itemsize(), offset)
      : at::detail::computeStorageNbytesContiguous(size, t.itemsize(), offset);
  bool empty = std::find(size.begin(), size.end(), 0) != size.end();
  auto* storage = t.storage().unsafeGetStorageImpl();
  if (!empty && needed > storage->nbytes()) resize_storage(*storage, needed);
}

// Checks a launch as CUDA does.
void raise_last_error() {
  auto code = std::exchange(last_error, 0);
  TORCH_CHECK(!code, "pretend error: a kernel was launched after error ", code,
              ", which was never read");
}

// Queues work on a stream.  It may use the blocks, whether or not they are freed meanwhile.
void queue_work(StreamKey key, std::function<void()> run, std::vector<BlockPtr> uses,
                size_t over_link = 0) {
  Lock lock(state().mutex);
  enqueue(lock, queue_of(key), {std::move(run), std::move(uses), {}, {}, over_link});
}

void queue_work(c10::DeviceIndex device, std::function<void()> run, std::vector<BlockPtr> uses,
                size_t over_link = 0) {
  queue_work(StreamKey(device, current_stream_ids[device]), std::move(run), std::move(uses),
             over_link);
}

// Applies `through(tensor, is_index)` to the tensors of a value; nothing if it holds none.
template <typename Through>
std::optional<c10::IValue> tensors_through(const c10::IValue& value, Through through) {
  if (value.isTensor()) return through(value.toTensor(), false);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(through(t, false));
    return list;
  }
  if (value.isOptionalTensorList()) {  // only indexing takes these
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector()) {
      list.push_back(t ? std::optional<at::Tensor>(through(*t, true)) : std::nullopt);
    }
    return list;
  }
  return std::nullopt;
}

// The CPU tensors that replace device tensors during one kernel.  Device
// storages and their replacements are paired, so that aliasing is kept.
struct StandIns {
  struct Pair {
    c10::Storage device, cpu;
  };
  std::vector<Pair> storages;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;  // device, cpu
  std::vector<BlockPtr> blocks;                            // the memory of them all

  c10::Storage cpu_storage(const c10::Storage& device) {
    for (auto& pair : storages) {
      if (pair.device.is_alias_of(device)) return pair.cpu;
    }
    auto block = find_block(device.data());
    auto* data = as_seen(block, const_cast<void*>(device.data()));
    c10::DataPtr borrowed(data, c10::Device(c10::kCPU));
    c10::Storage cpu(c10::Storage::use_byte_size_t(), device.nbytes(), std::move(borrowed),
                     c10::GetCPUAllocator(), /*resizable=*/true);
    storages.push_back({device, cpu});
    if (block) blocks.push_back(block);
    return cpu;
  }

  // For pinned memory, too: a kernel that runs later must not hold the user's own tensor.
  at::Tensor alias(const at::Tensor& t) {
    auto result = at::detail::make_tensor<c10::TensorImpl>(
        cpu_storage(t.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
    copy_geometry(result, t);
    copy_flags(result, t);
    return result;
  }

  at::Tensor cpu(const at::Tensor& t) {
    if (!on_device(t)) return t;
    auto result = alias(t);
    tensors.emplace_back(t, result);
    return result;
  }

  // An in-place or out= kernel may have changed the shape, or have moved to a
  // bigger storage, which then is plain CPU memory.
  void write_back() {
    for (auto& [device, cpu] : tensors) {
      bool same = device.sizes() == cpu.sizes() && device.strides() == cpu.strides() &&
          device.storage_offset() == cpu.storage_offset();
      if (same) continue;
      if (cpu.storage().data() != device.storage().data()) {
        resize_storage(*device.storage().unsafeGetStorageImpl(), cpu.storage().nbytes());
        fill(device.storage(), cpu.storage(), device.device().index());
      }
      copy_geometry(device, cpu);
    }
  }

  at::Tensor device(const at::Tensor& out, c10::Device target) {
    if (!out.defined()) return out;
    for (auto& [device, cpu] : tensors) {
      if (cpu.is_same(out)) return device;
    }
    for (auto& pair : storages) {
      if (pair.cpu.is_alias_of(out.storage())) return view(pair.device, out);
    }
    return fresh(out, target);
  }

  static at::Tensor view(const c10::Storage& storage, const at::Tensor& out) {
    auto result = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(storage),
        c10::DispatchKeySet({c10::DispatchKey::PrivateUse1, c10::DispatchKey::ADInplaceOrView,
                             c10::DispatchKey::AutogradPrivateUse1,
                             c10::DispatchKey::AutocastPrivateUse1}),
        out.dtype());
    copy_geometry(result, out);
    result._set_conj(out.is_conj());
    result._set_neg(out.is_neg());
    return result;
  }

  static at::Tensor fresh(const at::Tensor& out, c10::Device target) {
    if (out._is_zerotensor()) return at::zeros(out.sizes(), out.options().device(target));
    auto source = out.is_non_overlapping_and_dense() ? out : out.contiguous();
    auto result = like(source, target);
    fill(result.storage(), source.storage(), target.index(),
         source.storage_offset() * source.itemsize());
    result._set_conj(source.is_conj());
    result._set_neg(source.is_neg());
    return result;
  }

  // In stream order, as the memory may be that of a block whose last use is queued.
  static void fill(const c10::Storage& to, const c10::Storage& from, c10::DeviceIndex device,
                   size_t offset = 0) {
    auto size = std::min(to.nbytes(), from.nbytes() - offset);
    if (!size) return;
    auto run = [to = to.mutable_data(), from, offset, size] {
      std::memcpy(to, static_cast<const char*>(from.data()) + offset, size);
    };
    queue_work(device, run, {find_block(to.data())});
  }
};

// ---------------------------------------------------------------- fallback

enum class Moment {
  kAtOnce,  // views and the like, which use no memory
  kLater,   // a stream may run it later
  kSynchronous,  // the host must wait: the result depends on data of the device
};

bool wants_generator(const c10::Argument& argument) {
  auto* optional = argument.type()->castRaw<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

bool has_tag(const c10::OperatorHandle& op, at::Tag tag) { return op.hasTag(tag); }

bool is_tensor(const c10::TypePtr& type) { return type->isSubtypeOf(*c10::TensorType::get()); }

Moment find_moment(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto& name = schema.operator_name().name;
  if (name.rfind("aten::", 0) != 0) return Moment::kSynchronous;
  bool writes = false, aliases = false;
  for (auto& argument : schema.arguments()) {
    writes |= argument.alias_info() && argument.alias_info()->isWrite();
  }
  for (auto& result : schema.returns()) {
    aliases |= result.alias_info() && !result.alias_info()->isWrite();
  }
  if ((aliases && !writes) || has_tag(op, at::Tag::inplace_view)) return Moment::kAtOnce;
  for (auto& result : schema.returns()) {
    bool tensors = result.type()->kind() == c10::TypeKind::ListType &&
        is_tensor(result.type()->castRaw<c10::ListType>()->getElementType());
    if (aliases || !(is_tensor(result.type()) || tensors)) return Moment::kSynchronous;
  }
  bool random = false;
  for (auto& argument : schema.arguments()) random |= wants_generator(argument);
  bool seeded = has_tag(op, at::Tag::nondeterministic_seeded) &&
      name != "aten::_scaled_dot_product_flash_attention_for_cpu";  // never with dropout
  if (seeded && !random) return Moment::kSynchronous;
  bool indexing = name.rfind("aten::index", 0) == 0;  // with a mask only, its kernel on meta says
  if (has_tag(op, at::Tag::data_dependent_output) ||
      (has_tag(op, at::Tag::dynamic_output_shape) && !indexing) ||
      name == "aten::_pack_padded_sequence" || name == "aten::_efficientzerotensor" ||
      !op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) {
    return Moment::kSynchronous;
  }
  return Moment::kLater;
}

// torch's own operators are a few thousand at most, and the shapes that tests use are few.
template <typename Key, typename Value>
struct Memo {
  std::mutex mutex;
  std::unordered_map<Key, Value> values;

  std::optional<Value> find(const Key& key) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = values.find(key);
    return found == values.end() ? std::nullopt : std::optional<Value>(found->second);
  }
  void add(const Key& key, const Value& value) {
    std::lock_guard<std::mutex> lock(mutex);
    if (values.size() > 20000) values.clear();
    values.emplace(key, value);
  }
};

Moment moment_of(const c10::OperatorHandle& op) {
  static auto* known = new Memo<c10::OperatorHandle, Moment>();
  auto found = known->find(op);
  if (!found) known->add(op, *(found = find_moment(op)));
  return *found;
}

// The same call on another device, without data or with ones.
struct Shadow {
  c10::Device device;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;  // the call's, ours

  at::Tensor in(const at::Tensor& t) {
    if (!t.defined() || t.unsafeGetTensorImpl()->is_wrapped_number()) return t;
    for (auto& [theirs, ours] : tensors) {
      if (theirs.is_same(t)) return ours;
    }
    auto result = like(t, device);
    if (device.is_cpu()) result.fill_(1);
    copy_flags(result, t);
    tensors.emplace_back(t, result);
    return result;
  }

  c10::IValue in_value(const c10::IValue& value) {
    if (auto found = tensors_through(value, [&](const at::Tensor& t, bool) { return in(t); })) return *found;
    if (value.isDevice()) return device;
    return value;
  }

  static bool differ(const std::pair<at::Tensor, at::Tensor>& pair) {
    auto& [theirs, ours] = pair;
    return theirs.sizes() != ours.sizes() || theirs.strides() != ours.strides();
  }

  bool has_other_shapes() const { return std::any_of(tensors.begin(), tensors.end(), differ); }

  // Gives the call's tensors the shapes that ours have got, as out= arguments.
  void resize_theirs() const {
    for (auto& pair : tensors) {
      if (!differ(pair)) continue;
      auto& [theirs, ours] = pair;
      make_room(theirs, ours.sizes(), ours.strides());
      theirs.unsafeGetTensorImpl()->set_sizes_and_strides(ours.sizes(), ours.strides());
    }
  }
};

// What one call of the fallback knows about its arguments.
struct Call {
  StandIns stand_ins;
  std::string name;
  Moment moment = Moment::kLater;
  std::optional<c10::Device> target;  // where new outputs go
  std::optional<c10::Device> seen;    // device of the first tensor with a shape

  bool packs() const { return name == "aten::_pack_padded_sequence"; }

  // CUDA kernels, too, take CPU scalars, CPU indices and CPU lengths.
  bool may_be_on_cpu(const at::Tensor& t, bool is_index) const {
    return t.dim() == 0 || is_index || (packs() && seen);
  }

  void note(const at::Tensor& t, bool is_index) {
    if (on_device(t)) {
      if (!target) target = t.device();
    } else if (!t.defined() || may_be_on_cpu(t, is_index)) {
      return;
    }
    if (!seen) seen = t.device();
    TORCH_CHECK(*seen == t.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                *seen, " and ", t.device(), "! (in ", name, ")");
  }

  // CPU operands are read at the call, as in CUDA.
  at::Tensor in(const at::Tensor& t, bool is_index = false) {
    note(t, is_index);
    bool stays = moment != Moment::kLater || !t.defined() ||
        t.unsafeGetTensorImpl()->is_wrapped_number();
    if (stays || on_device(t)) return stand_ins.cpu(t);
    auto copy = t.clone();
    copy_flags(copy, t);
    return copy;
  }

  c10::IValue in_value(const c10::IValue& value) {
    auto into = [&](const at::Tensor& t, bool is_index) { return in(t, is_index); };
    if (auto found = tensors_through(value, into)) return *found;
    if (value.isGenerator()) return cpu_generator(value.toGenerator());
    if (value.isDevice()) {
      if (value.toDevice().type() == kType) target = device_at(checked(value.toDevice().index()));
      return c10::Device(c10::kCPU);
    }
    return value;
  }

  at::Tensor out(const at::Tensor& t) { return stand_ins.device(t, *target); }

  c10::IValue out_value(const c10::IValue& value) {
    return tensors_through(value, [&](const at::Tensor& t, bool) { return out(t); }).value_or(value);
  }

  // Set later by a kernel.
  at::Tensor promise(const at::Tensor& meta, std::vector<at::Tensor>& places) {
    if (!meta.defined()) {
      places.emplace_back();
      return meta;
    }
    auto dense = meta.is_non_overlapping_and_dense() ? meta : at::empty_like(meta);
    auto result = like(dense, *target);
    places.push_back(stand_ins.cpu(result));
    return result;
  }

  // Queues a kernel whose results go to the places.
  void later(std::function<std::vector<at::Tensor>()> kernel, std::vector<at::Tensor> places) {
    auto run = [kernel = std::move(kernel), places = std::move(places)] {
      auto results = kernel();
      for (size_t i = 0; i < results.size(); ++i) {
        // Outputs that the CPU leaves empty, as batch_norm's statistics, stay NaN.
        bool empty = !places[i].defined() || !results[i].defined() || !results[i].numel();
        if (!empty) places[i].copy_(results[i]);
      }
    };
    raise_last_error();
    queue_work(target->index(), run, stand_ins.blocks);
  }
};

using Values = std::vector<c10::IValue>;

// Everything that determines the shapes of a call's results, as bytes: the operator, the shapes of
// tensors, which of them are the same, and other values.
struct Signature {
  std::string bytes;
  bool complete = true;  // false: some value has an unknown kind
  std::vector<c10::TensorImpl*> seen;

  Signature(const c10::OperatorHandle& op, const Values& arguments) {
    add(std::hash<c10::OperatorHandle>()(op));
    add(c10::get_default_dtype_as_scalartype());
    for (auto& value : arguments) add_value(value);
  }

  template <typename T>
  void add(T value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }

  template <typename List>
  void add_all(const List& values) {
    add(values.size());
    for (auto value : values) add(value);
  }

  void add_tensor(const at::Tensor& t) {
    add(t.defined());
    if (!t.defined()) return;
    complete &= t.layout() == at::kStrided;
    if (!complete) return;
    auto* impl = t.unsafeGetTensorImpl();
    auto place = std::find(seen.begin(), seen.end(), impl);
    add(place - seen.begin());
    if (place == seen.end()) seen.push_back(impl);
    add(t.scalar_type());
    for (bool flag : {t.is_conj(), t.is_neg(), impl->is_wrapped_number()}) add(flag);
    add_all(t.sizes());
    add_all(t.strides());
  }

  void add_value(const c10::IValue& value) {
    for (bool kind : {value.isTensor(), value.isInt(), value.isDouble(), value.isBool(),
                      value.isIntList(), value.isDoubleList(), value.isBoolList(),
                      value.isTensorList(), value.isOptionalTensorList(), value.isString()}) {
      add(kind);
    }
    if (value.isTensor()) {
      add_tensor(value.toTensor());
    } else if (value.isInt()) {
      add(value.toInt());
    } else if (value.isDouble()) {
      add(value.toDouble());
    } else if (value.isBool()) {
      add(value.toBool());
    } else if (value.isIntList()) {
      add_all(value.toIntVector());
    } else if (value.isDoubleList()) {
      add_all(value.toDoubleVector());
    } else if (value.isBoolList()) {
      add_all(value.toBoolList().vec());
    } else if (value.isTensorList()) {
      add(value.toTensorVector().size());
      for (const at::Tensor& t : value.toTensorVector()) add_tensor(t);
    } else if (value.isOptionalTensorList()) {
      add(value.toOptionalTensorVector().size());
      for (auto& t : value.toOptionalTensorVector()) add_tensor(t ? *t : at::Tensor());
    } else if (value.isString()) {
      add_all(value.toStringRef());
    } else {
      add(value.isNone());
      complete &= value.isNone() || value.isDevice() || value.isGenerator();
    }
  }
};

// The results of a call that need no data, on the meta device.  Nothing if it has to run.
std::optional<Values> ask_meta(const c10::OperatorHandle& op, const Values& arguments,
                               Shadow& shadow) {
  try {
    at::AutoDispatchBelowADInplaceOrView guard;
    Values stack;
    for (auto& value : arguments) stack.push_back(shadow.in_value(value));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    return stack;
  } catch (const std::exception&) {
    return std::nullopt;  // running it will show whether this is the user's mistake
  }
}

// The same, asked once for each signature.  If tensors of the call get other shapes, the shadow
// knows them.
std::optional<Values> predict(const c10::OperatorHandle& op, const Values& arguments,
                              Shadow& shadow) {
  static auto* known = new Memo<std::string, std::optional<Values>>();
  Signature signature(op, arguments);
  if (signature.complete) {
    if (auto found = known->find(signature.bytes)) return *found;
  }
  auto results = ask_meta(op, arguments, shadow);
  if (signature.complete && !shadow.has_other_shapes()) known->add(signature.bytes, results);
  return results;
}

// Random numbers are reserved at the call, as in CUDA: the generator advances by as much as the
// kernel takes for other values, and the kernel gets a copy of the old state.
void set_random_numbers_aside(const c10::OperatorHandle& op, const Values& arguments,
                              Values& stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  Shadow shadow{c10::Device(c10::kCPU)};
  Values ones;
  for (size_t i = 0; i < stack.size(); ++i) {
    bool is_generator = stack[i].isGenerator();
    ones.push_back(is_generator ? stack[i] : shadow.in_value(arguments[i]));
    if (is_generator) stack[i] = stack[i].toGenerator().clone();
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &ones);
}

// Which argument a result is, if it is one.
std::optional<size_t> written_argument(const c10::FunctionSchema& schema,
                                       const c10::Argument& result) {
  if (!result.alias_info()) return std::nullopt;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->beforeSets() == result.alias_info()->beforeSets()) return i;
  }
  return std::nullopt;
}

void add_tensors(const c10::IValue& value, std::vector<at::Tensor>& to) {
  if (value.isTensor()) to.push_back(value.toTensor());
  if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector()) to.push_back(t);
  }
}

// Queues the kernel, and returns its results, which are valid once it has run.
Values run_later(const c10::OperatorHandle& op, Call& call, const Values& arguments, Values stack,
                 const Values& predicted) {
  const auto& returns = op.schema().returns();
  Values results;
  std::vector<at::Tensor> places;
  for (size_t i = 0; i < returns.size(); ++i) {
    if (auto index = written_argument(op.schema(), returns[i])) {
      results.push_back(arguments[*index]);
      std::vector<at::Tensor> written;
      add_tensors(arguments[*index], written);
      places.resize(places.size() + written.size());
    } else if (predicted[i].isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : predicted[i].toTensorVector()) {
        list.push_back(call.promise(t, places));
      }
      results.push_back(list);
    } else {
      results.push_back(call.promise(predicted[i].toTensor(), places));
    }
  }
  call.later(
      [op, stack = std::move(stack)] {
        auto values = stack;
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &values);
        std::vector<at::Tensor> tensors;
        for (auto& value : values) add_tensors(value, tensors);
        return tensors;
      },
      std::move(places));
  return results;
}

void run_now(const c10::OperatorHandle& op, Call& call, Values& stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  call.stand_ins.write_back();
  for (size_t i = 0; i < stack.size(); ++i) {
    // The batch sizes of a packed sequence live on the CPU, on CUDA as well.
    if (!call.packs() || i != 1) stack[i] = call.out_value(stack[i]);
  }
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call;
  call.name = schema.operator_name().name;
  call.moment = moment_of(op);
  Values arguments = torch::jit::pop(*stack, schema.arguments().size()), inputs;
  for (auto& value : arguments) inputs.push_back(call.in_value(value));
  if (!call.target) call.target = device_at(current_device);
  c10::DeviceGuard guard(*call.target);
  std::optional<Values> predicted;
  Shadow shadow{c10::Device(c10::kMeta)};
  if (call.moment == Moment::kLater) predicted = predict(op, arguments, shadow);
  if (predicted && shadow.has_other_shapes()) {
    shadow.resize_theirs();
    call.stand_ins = {};
    inputs.clear();
    for (auto& value : arguments) inputs.push_back(call.in_value(value));
  }
  bool random = false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].isNone() && wants_generator(schema.arguments()[i])) {
      inputs[i] = cpu_generator(default_generator(call.target->index()));
    }
    random |= inputs[i].isGenerator();
  }
  if (predicted) {
    if (random) set_random_numbers_aside(op, arguments, inputs);
    inputs = run_later(op, call, arguments, std::move(inputs), *predicted);
  } else {
    if (call.moment != Moment::kAtOnce) synchronize_current(call.target->index());
    run_now(op, call, inputs);
  }
  for (auto& value : inputs) stack->push_back(std::move(value));
}

// ------------------------------------------------------------------ kernels

c10::DispatchKeySet device_keys() { return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1); }

c10::Device wanted(std::optional<c10::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return device_at(device ? checked(device->index()) : current_device);
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device> device,
                 std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(wanted(device, pin));
  return at::detail::empty_generic(size, device_memory(), device_keys(),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> device, std::optional<bool> pin) {
  c10::DeviceGuard guard(wanted(device, pin));
  return at::detail::empty_strided_generic(size, stride, device_memory(), device_keys(),
                                           c10::dtype_or_default(dtype));
}

// True if one memcpy does it; only then CUDA's copy is asynchronous.
bool is_plain_copy(const at::Tensor& from, const at::Tensor& to) {
  if (from.dtype() != to.dtype() || from.sizes() != to.sizes()) return false;
  if (from.is_conj() != to.is_conj() || from.is_neg() != to.is_neg()) return false;
  if (from.is_contiguous() && to.is_contiguous()) return true;
  return from.strides() == to.strides() && from.is_non_overlapping_and_dense();
}

void count_copy(bool from_device, bool to_device, size_t size) {
  Lock lock(state().mutex);
  state().copied[from_device && to_device ? 2 : from_device ? 1 : 0] += int64_t(size);
}

// On the current stream of a device.
void queue_copy(const at::Tensor& from, const at::Tensor& to, c10::DeviceIndex index) {
  StandIns stand_ins;
  auto run = [to = stand_ins.alias(to), from = stand_ins.alias(from)] { to.copy_(from); };
  queue_work(index, run, stand_ins.blocks, on_device(from) == on_device(to) ? 0 : to.nbytes());
}

// The source's stream copies, after what the target's stream did before; that waits for it.
void queue_copy_between_devices(const at::Tensor& from, const at::Tensor& to) {
  auto current = [](const at::Tensor& t) {
    auto index = t.device().index();
    return StreamKey(index, current_stream_ids[index]);
  };
  auto pass = [](StreamKey earlier, StreamKey later) {
    MarkPtr mark;
    {
      Lock lock(state().mutex);
      mark = mark_now(queue_of(earlier));
    }
    wait_in_stream(later, mark);
  };
  pass(current(to), current(from));
  queue_copy(from, to, from.device().index());
  pass(current(from), current(to));
}

// CUDA does not stage in pageable memory: it converts on the device.
bool is_asynchronous(const at::Tensor& from, const at::Tensor& to) {
  const auto& host = on_device(to) ? from : to;
  if (!is_pinned(host.const_data_ptr()) || from.sizes() != to.sizes()) return false;
  return is_plain_copy(from, to) ||
      (host.is_contiguous() && !host.is_conj() && !host.is_neg() && !from.is_conj() &&
       !from.is_neg());
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  count_copy(on_device(from), on_device(to), to.nbytes());
  if (on_device(from) && on_device(to)) {
    if (from.device() != to.device()) {
      queue_copy_between_devices(from, to);
    } else {
      queue_copy(from, to, to.device().index());
    }
    return to;
  }
  auto index = (on_device(to) ? to : from).device().index();
  if (non_blocking && is_asynchronous(from, to)) {
    queue_copy(from, to, index);
    return to;
  }
  synchronize_current(index);
  StandIns stand_ins;
  auto seen = [&](const at::Tensor& t) {
    bool by_device = on_device(t) || is_pinned(t.const_data_ptr());
    return by_device ? stand_ins.alias(t) : t;
  };
  seen(to).copy_(seen(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

void record_stream(at::Tensor& t, c10::Stream stream) {
  device_memory()->recordStream(t.storage().data_ptr(), stream);
}

const at::Tensor& resize_(const at::Tensor& t, c10::IntArrayRef size,
                          std::optional<c10::MemoryFormat> format) {
  make_room(t, size, {});
  at::native::resize_impl_cpu_(t.unsafeGetTensorImpl(), size, std::nullopt);
  if (format) t.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return t;
}

at::Tensor& set_slice(at::Tensor& t, c10::Storage source, int64_t offset, c10::IntArrayRef size,
                      c10::IntArrayRef stride) {
  TORCH_CHECK(source.device() == t.device(), "Attempted to set the storage of a tensor on device ",
              t.device(), " to a storage on different device ", source.device());
  c10::DeviceGuard guard(source.device());
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  make_room(t, size, stride);
  at::native::resize_impl_cpu_(impl, size,
                               stride.data() ? c10::OptionalIntArrayRef(stride) : std::nullopt);
  return t;
}

at::Tensor& set_storage(at::Tensor& t, c10::Storage source) {
  int64_t count = int64_t(source.nbytes() / t.itemsize());
  return set_slice(t, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& source) {
  return set_slice(t, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& t) {
  c10::DeviceGuard guard(t.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_memory(), true);
  return set_slice(t, std::move(none), 0, {0}, {});
}

// Lets `parameter.data = tensor` cross between CPU and pretend, as core
// allows it between CPU and CUDA.
bool same_kind_of_tensor(const at::Tensor& a, const at::Tensor& b) {
  auto dense = [](const at::Tensor& t) {
    return t.key_set().has_any(c10::DispatchKeySet(c10::DispatchKey::Dense));
  };
  return dense(a) && dense(b);
}

at::MemoryFormat convolution_format(const at::Tensor& input, const at::Tensor& weight) {
  auto format = input.suggest_memory_format();
  return format == at::MemoryFormat::Contiguous ? weight.suggest_memory_format() : format;
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
                       c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups) {
  Call call;
  call.name = "aten::convolution";
  auto cpu_input = call.in(input), cpu_weight = call.in(weight);
  std::optional<at::Tensor> cpu_bias;
  if (bias && bias->defined()) cpu_bias = call.in(*bias);
  auto kernel = [=, stride = stride.vec(), padding = padding.vec(), dilation = dilation.vec(),
                 output_padding = output_padding.vec()] {
    return std::vector<at::Tensor>{at::convolution(cpu_input, cpu_weight, cpu_bias, stride, padding,
                                                   dilation, transposed, output_padding, groups)};
  };
  auto size = transposed
      ? at::native::conv_input_size(input.sizes(), weight.sizes(), padding, output_padding, stride,
                                    dilation, groups)
      : at::native::conv_output_size(input.sizes(), weight.sizes(), padding, stride, dilation);
  auto meta = at::empty(size, input.options().device(c10::kMeta).memory_format(
                                  convolution_format(input, weight)));
  std::vector<at::Tensor> places;
  auto result = call.promise(meta, places);
  call.later(kernel, places);
  return result;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
    c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  Call call;
  call.name = "aten::convolution_backward";
  auto cpu_grad = call.in(grad), cpu_input = call.in(input), cpu_weight = call.in(weight);
  std::vector<int64_t> bias_size{transposed ? weight.size(1) * groups : weight.size(0)};
  auto kernel = [=, stride = stride.vec(), padding = padding.vec(), dilation = dilation.vec(),
                 output_padding = output_padding.vec()] {
    auto [a, b, c] = at::convolution_backward(cpu_grad, cpu_input, cpu_weight, bias_size, stride,
                                              padding, dilation, transposed, output_padding, groups,
                                              mask);
    return std::vector<at::Tensor>{a, b, c};
  };
  auto meta = [&](c10::IntArrayRef size, bool wanted) {
    auto options = input.options().device(c10::kMeta);
    if (!wanted) return at::Tensor();
    auto format = size.size() == 1 ? at::MemoryFormat::Contiguous
                                   : convolution_format(input, weight);
    return at::empty(size, options.memory_format(format));
  };
  std::vector<at::Tensor> places;
  auto a = call.promise(meta(input.sizes(), mask[0]), places);
  auto b = call.promise(meta(weight.sizes(), mask[1]), places);
  auto c = call.promise(meta(bias_size, mask[2]), places);
  call.later(kernel, places);
  return {a, b, c};
}

// As the CPU's, but its mask is drawn at the call.
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p,
                                           std::optional<bool> train) {
  auto mask = at::ones(input.sizes(), at::kBool);
  if (!train.value_or(true)) return {input.clone(), StandIns::fresh(mask, input.device())};
  auto on_device_mask = StandIns::fresh(mask.bernoulli_(1 - p), input.device());
  return {input.mul(on_device_mask).mul_(p == 1 ? 0. : 1 / (1 - p)), on_device_mask};
}

// Attention then takes the same path as on the CPU.
int64_t attention_choice(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool grouped) {
  StandIns stand_ins;
  auto cpu = [&](const at::Tensor& t) {
    return stand_ins.cpu(t).set_requires_grad(t.requires_grad());
  };
  auto cpu_mask = mask && mask->defined() ? std::optional<at::Tensor>(cpu(*mask)) : std::nullopt;
  return at::_fused_sdp_choice(cpu(query), cpu(key), cpu(value), cpu_mask, dropout, causal, scale,
                               grouped);
}

// torch prefers its own composite kernels to a fallback.  Where the CPU has a
// separate kernel, such as layer_norm, only that one gives equal numbers.
void use_cpu_kernels_over_composites() {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, 0);
  using Key = c10::DispatchKey;
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || name.name.rfind("aten::", 0) != 0) continue;
    bool composite = op->hasKernelForDispatchKey(Key::CompositeExplicitAutograd) ||
        op->hasKernelForDispatchKey(Key::CompositeImplicitAutograd);
    if (!composite || !op->hasKernelForDispatchKey(Key::CPU) ||
        op->hasKernelForDispatchKey(Key::PrivateUse1)) {
      continue;
    }
    auto full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

void seed_all(int64_t seed) {
  for (int i = 0; i < kDevices; ++i) {
    auto generator = default_generator(static_cast<c10::DeviceIndex>(i));
    generator.set_current_seed(static_cast<uint64_t>(seed));
  }
}

at::Tensor get_rng_state(int64_t index) {
  return default_generator(static_cast<c10::DeviceIndex>(index)).get_state();
}

void set_rng_state(int64_t index, const at::Tensor& value) {
  auto generator = default_generator(static_cast<c10::DeviceIndex>(index));
  generator.set_state(value);
}

}  // namespace
