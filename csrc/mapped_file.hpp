// A read-only file of known size, mapped or read with pread. Nothing here hands out a byte past the end of the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

namespace prism {

/// A data file is not what it says it is. The message names file, offset, expected and found.
class DataFault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The operating system refused; `code()` holds errno. Becomes OSError in Python.
class FileError : public std::system_error {
 public:
  FileError(int error, std::string path);
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// How bytes reach us. A mapping is fastest, but a file that is cut short by someone else, or a network filesystem that
/// goes away, turns a load from it into SIGBUS; pread turns the same into an error. `automatic` maps local files and
/// reads network ones.
enum class Access { automatic, map, pread };

class MappedFile {
 public:
  explicit MappedFile(std::string path, Access access = Access::automatic);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }
  bool mapped() const { return mapped_; }
  const std::byte* mapping() const { return data_; }  // null when not mapped, or empty

  /// Bytes [offset, offset + length): in place when mapped (`scratch` untouched), otherwise read into `scratch`.
  /// `what` names the region in the error when it does not fit the file.
  std::span<const std::byte> bytes(std::uint64_t offset, std::uint64_t length, std::vector<std::byte>& scratch,
                                   const char* what) const;

  /// Copies bytes [offset, offset + out.size()) into `out`.
  void read(std::uint64_t offset, std::span<std::byte> out, const char* what) const;

 private:
  void require(std::uint64_t offset, std::uint64_t length, const char* what) const;

  std::string path_;
  std::uint64_t size_ = 0;
  int fd_ = -1;
  bool mapped_ = false;
  const std::byte* data_ = nullptr;
};

}  // namespace prism
