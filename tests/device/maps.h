// Detects each change of a map of registered memory: the driver keeps using the locked pages.
//
// It begins with the functions of libc through which all libraries of the process change maps
// (malloc, Python's mmap, ctypes): their first instructions become a jump to the ones here, which
// check, and then make the same system call.

#pragma once

#include "streams.h"

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// Registered memory, read by threads that change a map while they may hold any lock, as malloc's.
// So it takes no lock, and allocates no memory. Written under the lock of the state.
struct Watched {
  std::atomic<uintptr_t> begin{0}, end{0};  // begin 0: nothing
};
constexpr size_t kWatched = 1 << 14;
Watched watched[kWatched];
std::atomic<size_t> watched_count{0};

void watch(const void* data, size_t size) {
  auto begin = reinterpret_cast<uintptr_t>(data);
  size_t i = 0;
  while (i < watched_count && watched[i].begin) ++i;
  TORCH_CHECK(i < kWatched, "pretend: too much is registered");
  watched[i].end = begin + size;
  watched[i].begin = begin;
  if (i == watched_count) ++watched_count;
}

void unwatch(const void* data) {
  for (size_t i = 0; i < watched_count; ++i) {
    if (watched[i].begin == reinterpret_cast<uintptr_t>(data)) watched[i].begin = 0;
  }
}

bool is_watched(uintptr_t begin, size_t size) {
  for (size_t i = 0; i < watched_count; ++i) {
    auto first = watched[i].begin.load();
    if (first && first < begin + size && begin < watched[i].end) return true;
  }
  return false;
}

// Queued work runs before the pages are unmapped. From then on the device sees a copy of them.
void registered_memory_goes(const char* call, uintptr_t begin, size_t size) {
  Lock lock(state().mutex);
  for (int i = 0; i < kDevices; ++i) drain_device(lock, static_cast<c10::DeviceIndex>(i));
  char message[200];
  std::snprintf(message, sizeof message,
                "pretend error: %s of %zu bytes at %p, where registered memory is\n", call, size,
                reinterpret_cast<void*>(begin));
  for (auto& [address, block] : state().blocks) {
    bool here = address < begin + size && begin < address + block->size;
    if (!here || block->device >= 0 || block->chunk || block->old) continue;
    block->old = std::make_shared<Chunk>(block->size);
    std::memcpy(block->old->data, block->data, block->size);
    unwatch(block->data);
    ++state().unmapped_registered;
  }
  if (!state().error) state().error = std::make_exception_ptr(std::runtime_error(message));
  // Also printed at once: a process that is ending reads no error any more.
  [[maybe_unused]] auto written = ::write(STDERR_FILENO, message, std::strlen(message));
}

void look(const char* call, const void* data, size_t size) {
  auto begin = reinterpret_cast<uintptr_t>(data);
  if (is_watched(begin, size)) registered_memory_goes(call, begin, size);
}

int watching_munmap(void* data, size_t size) {
  look("munmap", data, size);
  return static_cast<int>(::syscall(SYS_munmap, data, size));
}

void* watching_mmap(void* data, size_t size, int protection, int flags, int file, off_t offset) {
  if (flags & MAP_FIXED) look("mmap", data, size);
  return reinterpret_cast<void*>(
      ::syscall(SYS_mmap, data, size, protection, flags, file, offset));
}

void* watching_mremap(void* data, size_t size, size_t new_size, int flags, void* target) {
  look("mremap", data, size);
  if (flags & MREMAP_FIXED) look("mremap", target, new_size);
  return reinterpret_cast<void*>(::syscall(SYS_mremap, data, size, new_size, flags, target));
}

int watching_madvise(void* data, size_t size, int advice) {
  if (advice == MADV_DONTNEED || advice == MADV_FREE || advice == MADV_REMOVE) {
    look("madvise", data, size);
  }
  return static_cast<int>(::syscall(SYS_madvise, data, size, advice));
}

#if defined(__x86_64__) && defined(__GLIBC__)

bool redirect(const char* name, const void* to) {
  auto* libc = dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD);
  auto* code = libc ? static_cast<unsigned char*>(dlsym(libc, name)) : nullptr;
  if (!code) return false;
  unsigned char jump[14] = {0xFF, 0x25};  // jmp *0(%rip), and the address follows
  std::memcpy(jump + 6, &to, sizeof to);
  auto page = reinterpret_cast<uintptr_t>(code) & ~uintptr_t(kAlignment - 1);
  auto size = reinterpret_cast<uintptr_t>(code) + sizeof jump - page;
  auto* start = reinterpret_cast<void*>(page);
  if (::mprotect(start, size, PROT_READ | PROT_WRITE | PROT_EXEC)) return false;
  std::memcpy(code, jump, sizeof jump);
  return !::mprotect(start, size, PROT_READ | PROT_EXEC);
}

bool watch_maps() {
  // A fork has no registered memory, and something else may be mapped at its addresses.
  pthread_atfork(nullptr, nullptr, [] { watched_count = 0; });
  return redirect("munmap", reinterpret_cast<void*>(&watching_munmap)) &&
      redirect("mmap", reinterpret_cast<void*>(&watching_mmap)) &&
      redirect("mremap", reinterpret_cast<void*>(&watching_mremap)) &&
      redirect("madvise", reinterpret_cast<void*>(&watching_madvise));
}

#else

bool watch_maps() { return false; }

#endif

const bool watches_maps = watch_maps();

}  // namespace
