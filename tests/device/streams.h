// Streams: queues of work that runs later than its call, at moments drawn by a seed.

#pragma once

#include "state.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <chrono>

namespace {

// As in CUDA, a call waits when its stream's queue is full.
constexpr size_t kLaunchLimit = 1024;

Queue& queue_of(StreamKey key) {
  auto& queue = state().devices[key.first].queues[key.second];
  queue.key = key;
  return queue;
}

Queue& current_queue(c10::DeviceIndex device) {
  return queue_of({device, current_stream_ids[device]});
}

double now_ms() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

void push(Queue& queue, Task task) {
  task.queued_ms = now_ms();
  if (queue.tasks.empty()) {
    queue.turn = ++state().turns;
    state().busy[queue.turn] = &queue;
  }
  queue.tasks.push_back(std::move(task));
  state().changed.notify_all();  // threads that work for the device
}

void pop(Queue& queue) {
  queue.tasks.pop_front();
  if (queue.tasks.empty()) state().busy.erase(queue.turn);
}

// Where links have a speed, the times of a stream are those of a device that begins with each
// task as soon as it can, whenever some thread comes to run it here.
void finish(const MarkPtr& mark) {
  auto free_at = queue_of(mark->stream).free_at_ms;
  mark->time_ms = state().link_speed ? std::max(mark->queued_ms, free_at) : now_ms();
  mark->done = true;
}

// Removes entries that need not run from the front of a queue: marks that have
// been reached and waits that have ended.
void settle(Queue& queue) {
  while (!queue.running && !queue.tasks.empty() && !queue.tasks.front().run) {
    auto wait = queue.tasks.front().wait;
    if (wait && !wait->done) {
      if (!wait->captured) settle(queue_of(wait->stream));
      if (!wait->done) return;
      continue;  // that may have settled this queue, too
    }
    if (wait) queue.free_at_ms = std::max(queue.free_at_ms, wait->time_ms);
    else finish(queue.tasks.front().set);
    pop(queue);
  }
}

bool is_reached(const MarkPtr& mark) {
  if (mark && !mark->done && !mark->captured) settle(queue_of(mark->stream));
  return !mark || mark->done;
}

MarkPtr mark_now(Queue& queue) {
  auto mark = std::make_shared<Mark>(Mark{queue.key});
  mark->queued_ms = now_ms();
  settle(queue);
  if (queue.capturing) {
    mark->captured = true;
    state().capture->marks.push_back(mark);
  } else if (queue.tasks.empty()) {
    finish(mark);
  } else {
    push(queue, {{}, {}, mark, nullptr});
  }
  return mark;
}

// ----------------------------------------------------------------- running

// A kernel does not see the state of the thread that runs it: no modes, no autograd.
struct AsDevice {
  c10::impl::ForceDispatchKeyGuard keys{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::default_excluded_set};
  c10::NoGradGuard no_grad;
};

void drain(Lock& lock, Queue& queue, const Mark* until);

// Runs the next task of an idle queue; for a wait, the task that it waits for.
void step(Lock& lock, Queue& queue) {
  if (auto wait = queue.tasks.front().wait) {
    // A mark is older than any wait for it, so this cannot go in circles.
    if (!is_reached(wait)) drain(lock, queue_of(wait->stream), wait.get());
    settle(queue);
    return;
  }
  if (queue.tasks.front().set) return settle(queue);
  Task task = std::move(queue.tasks.front());
  for (auto& block : task.uses) {
    if (!block->dead) continue;
    ++state().stale_tasks;
    break;
  }
  queue.running = true;
  double speed = state().link_speed, began = now_ms();
  double free_at = std::max(queue.free_at_ms, task.queued_ms);
  lock.unlock();
  std::exception_ptr error;
  try {
    AsDevice guard;
    task.run();
  } catch (...) {
    error = std::current_exception();
  }
  if (speed) {
    if (task.over_link) free_at += task.over_link / speed * 1e3;
    else free_at += task.lasts_ms ? task.lasts_ms : now_ms() - began;
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(free_at - now_ms()));
  }
  task = {};
  lock.lock();
  queue.free_at_ms = free_at;
  queue.running = false;
  if (error && !state().error) state().error = error;
  pop(queue);
  settle(queue);
  state().changed.notify_all();
}

// Runs a queue up to a mark in it.
void drain(Lock& lock, Queue& queue, const Mark* until) {
  while (!until->done && !queue.tasks.empty()) {
    if (queue.running) {
      state().changed.wait(lock);
    } else {
      step(lock, queue);
    }
  }
}

void drain(Lock& lock, Queue& queue) {
  auto mark = mark_now(queue);
  drain(lock, queue, mark.get());
}

void drain_device(Lock& lock, c10::DeviceIndex device) {
  std::vector<Queue*> queues;
  for (auto& entry : state().busy) {
    if (entry.second->key.first == device) queues.push_back(entry.second);
  }
  for (auto* queue : queues) drain(lock, *queue);
}

// The queues whose next task could run now.
std::vector<Queue*> runnable() {
  std::vector<Queue*> all, result;
  for (auto& entry : state().busy) all.push_back(entry.second);
  for (auto* queue : all) settle(*queue);
  for (auto* queue : all) {
    if (!queue->running && !queue->tasks.empty() && queue->tasks.front().run) {
      result.push_back(queue);
    }
  }
  return result;
}

// The device makes progress meanwhile, or not: this runs some tasks of any streams, on
// average one for `slowness` calls.
void progress(Lock& lock) {
  double slowness = state().slowness;
  while (state().random() / 0x1p64 < 1 / (1 + slowness)) {
    auto queues = runnable();
    if (queues.empty()) return;
    step(lock, *queues[state().random() % queues.size()]);
  }
}

void enqueue(Lock& lock, Queue& queue, Task task) {
  if (queue.capturing) return;  // captured work is never run
  push(queue, std::move(task));
  while (queue.tasks.size() > kLaunchLimit) {
    if (queue.running) {
      state().changed.wait(lock);
    } else {
      step(lock, queue);
    }
  }
  progress(lock);
}

// A kernel that computes nothing, and takes this long where links have a speed.
void occupy(int64_t index, double milliseconds) {
  Lock lock(state().mutex);
  Task task{[] {}};
  task.lasts_ms = milliseconds;
  enqueue(lock, current_queue(static_cast<c10::DeviceIndex>(index)), std::move(task));
}

// Runs all tasks that can run on this thread, for this long.
void work(double milliseconds) {
  Lock lock(state().mutex);
  for (double until = now_ms() + milliseconds; now_ms() < until;) {
    auto queues = runnable();
    if (queues.empty()) state().changed.wait_for(lock, std::chrono::milliseconds(1));
    else step(lock, *queues.front());
  }
}

void enqueue_wait(Queue& queue, const MarkPtr& mark) {
  if (!is_reached(mark) && mark->stream != queue.key) push(queue, {{}, {}, nullptr, mark});
}

// ------------------------------------------------- what a host can wait for

// CUDA rejects calls that would wait for, or query, work that is only being captured.
void refuse_in_capture(const char* what) {
  auto& capture = state().capture;
  if (!capture) return;
  if (!capture->every_thread && capture->thread != std::this_thread::get_id()) return;
  capture->broken = true;
  TORCH_CHECK(false, "pretend error: operation not permitted when stream is capturing (", what,
              ")");
}

void raise_error(Lock& lock) {
  auto error = std::exchange(state().error, nullptr);
  lock.unlock();
  if (error) std::rethrow_exception(error);
}

void synchronize(StreamKey key) {
  Lock lock(state().mutex);
  refuse_in_capture("synchronizing a stream");
  drain(lock, queue_of(key));
  raise_error(lock);
}

void synchronize_current(c10::DeviceIndex device) {
  synchronize({device, current_stream_ids[device]});
}

void synchronize_device(c10::DeviceIndex device) {
  Lock lock(state().mutex);
  refuse_in_capture("synchronizing a device");
  drain_device(lock, device);
  raise_error(lock);
}

void synchronize(const MarkPtr& mark) {
  Lock lock(state().mutex);
  refuse_in_capture("synchronizing an event");
  if (!is_reached(mark)) drain(lock, queue_of(mark->stream), mark.get());
  raise_error(lock);
}

bool query(const MarkPtr& mark) {
  Lock lock(state().mutex);
  refuse_in_capture("querying an event");
  if (!is_reached(mark)) progress(lock);
  return is_reached(mark);
}

bool query(StreamKey key) {
  Lock lock(state().mutex);
  refuse_in_capture("querying a stream");
  auto& queue = queue_of(key);
  settle(queue);
  if (!queue.tasks.empty()) progress(lock);
  settle(queue);
  return queue.tasks.empty();
}

// ----------------------------------------------------------------- capture

void begin_capture(StreamKey key, bool every_thread) {
  Lock lock(state().mutex);
  auto& queue = queue_of(key);
  TORCH_CHECK(key.second != 0,
              "pretend: graphs must be captured on a stream other than the default one");
  TORCH_CHECK(!state().capture, "pretend: another capture is under way");
  state().capture.emplace(Capture{std::this_thread::get_id(), every_thread});
  state().capture->queues.push_back(&queue);
  queue.capturing = true;
}

void end_capture() {
  Lock lock(state().mutex);
  TORCH_CHECK(state().capture, "pretend: no capture is under way");
  bool began_here = state().capture->thread == std::this_thread::get_id();
  TORCH_CHECK(began_here, "pretend: another thread began the capture");
  auto capture = std::move(*state().capture);
  state().capture.reset();
  for (auto* queue : capture.queues) queue->capturing = false;
  for (auto& mark : capture.marks) finish(mark);
  TORCH_CHECK(!capture.broken,
              "pretend error: operation failed due to a previous error during capture");
}

// A stream that waits for captured work is captured, too.
void wait_in_stream(StreamKey key, const MarkPtr& mark) {
  Lock lock(state().mutex);
  if (!mark) return;
  auto& queue = queue_of(key);
  if (mark->captured && !mark->done && !queue.capturing) {
    queue.capturing = true;
    state().capture->queues.push_back(&queue);
  } else if (queue.capturing && !mark->captured) {
    state().capture->broken = true;
    TORCH_CHECK(false, "pretend error: dependency created on uncaptured work in another stream");
  } else if (!queue.capturing) {
    enqueue_wait(queue, mark);
  }
}

}  // namespace
