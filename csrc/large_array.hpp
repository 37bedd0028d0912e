// A fixed-size array of plain numbers, uninitialised, in huge pages where the system grants them. Touching fresh memory
// 4 KiB at a time costs more than the counting sort that fills it, and random access to it misses the TLB every time.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>
#include <type_traits>

namespace prism {

template <class T>
class LargeArray {
  static_assert(std::is_trivial_v<T>);

 public:
  LargeArray() = default;
  explicit LargeArray(std::size_t size) : size_(size) {
    if (size > (std::size_t{1} << 62) / sizeof(T)) throw std::bad_alloc();
    const std::size_t bytes = size * sizeof(T);
    const std::size_t page = bytes < kHugePage ? alignof(std::max_align_t) : kHugePage;
    const std::size_t rounded = (bytes + page - 1) / page * page;
    if (rounded == 0) return;
    data_.reset(static_cast<T*>(std::aligned_alloc(page, rounded)));
    if (!data_) throw std::bad_alloc();
    if (page == kHugePage) madvise(data_.get(), rounded, MADV_HUGEPAGE);  // a hint: refused, all is as before
  }

  T* data() const { return data_.get(); }
  std::size_t size() const { return size_; }
  T& operator[](std::size_t i) const { return data_.get()[i]; }
  std::span<T> span() const { return {data_.get(), size_}; }

 private:
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;
  struct Free {
    void operator()(T* pointer) const { std::free(pointer); }
  };
  std::unique_ptr<T, Free> data_;
  std::size_t size_ = 0;
};

}  // namespace prism
