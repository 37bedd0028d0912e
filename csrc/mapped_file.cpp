#include "mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace prism {
namespace {

/// Filesystems whose pages can vanish under a mapping (f_type values of statfs(2)).
bool is_network_filesystem(int fd) {
  struct statfs info{};
  if (fstatfs(fd, &info) != 0) return false;
  switch (static_cast<std::uint32_t>(info.f_type)) {
    case 0x00006969u:  // NFS
    case 0x0000517Bu:  // SMB
    case 0xFF534D42u:  // CIFS
    case 0xFE534D42u:  // SMB2
    case 0x65735546u:  // FUSE (s3fs, gcsfuse, sshfs, ...)
    case 0x00C36400u:  // Ceph
    case 0x0BD00BD0u:  // Lustre
    case 0x47504653u:  // GPFS
    case 0x5346414Fu:  // AFS
    case 0x01021997u:  // 9P
      return true;
    default:
      return false;
  }
}

// A mapping ends at a page, not at the end of the file. Under AddressSanitizer a heap block of the exact size stands in
// for it, so that a read past the end is caught.
#if defined(__SANITIZE_ADDRESS__) || defined(PRISM_LIBFUZZER)
const std::byte* map(int fd, std::uint64_t size, const std::string& path) {
  auto* data = new std::byte[size];
  if (::pread(fd, data, size, 0) != static_cast<ssize_t>(size)) throw FileError(errno, path);
  return data;
}

void unmap(const std::byte* data, std::uint64_t) { delete[] data; }
#else
const std::byte* map(int fd, std::uint64_t size, const std::string& path) {
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) throw FileError(errno, path);
  return static_cast<const std::byte*>(data);
}

void unmap(const std::byte* data, std::uint64_t size) { ::munmap(const_cast<std::byte*>(data), size); }
#endif

}  // namespace

FileError::FileError(int error, std::string path)
    : std::system_error(error, std::generic_category(), path), path_(std::move(path)) {}

MappedFile::MappedFile(std::string path, Access access) : path_(std::move(path)) {
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd_ < 0) throw FileError(errno, path_);
  try {
    struct stat info{};
    if (::fstat(fd_, &info) != 0) throw FileError(errno, path_);
    if (S_ISDIR(info.st_mode)) throw FileError(EISDIR, path_);
    if (!S_ISREG(info.st_mode)) throw DataFault(path_ + ": not a regular file, so it has no size to check");
    size_ = static_cast<std::uint64_t>(info.st_size);
    mapped_ = access == Access::map || (access == Access::automatic && !is_network_filesystem(fd_));
    if (mapped_ && size_ != 0) data_ = map(fd_, size_, path_);
  } catch (...) {
    ::close(fd_);
    throw;
  }
  if (mapped_) {  // the mapping keeps the file; a run over thousands of shards should not hold as many descriptors
    ::close(fd_);
    fd_ = -1;
  }
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) unmap(data_, size_);
  if (fd_ >= 0) ::close(fd_);
}

void MappedFile::require(std::uint64_t offset, std::uint64_t length, const char* what) const {
  if (offset <= size_ && length <= size_ - offset) return;
  throw DataFault(path_ + ": offset " + std::to_string(offset) + ": expected " + std::to_string(length) + " bytes of " +
                  what + ", found " + std::to_string(offset < size_ ? size_ - offset : 0) + " (the file has " +
                  std::to_string(size_) + " bytes)");
}

std::span<const std::byte> MappedFile::bytes(std::uint64_t offset, std::uint64_t length,
                                             std::vector<std::byte>& scratch, const char* what) const {
  require(offset, length, what);
  if (length == 0) return {};
  if (data_ != nullptr) return {data_ + offset, static_cast<std::size_t>(length)};
  if (scratch.size() < length) scratch.resize(length);
  const std::span<std::byte> out(scratch.data(), static_cast<std::size_t>(length));
  read(offset, out, what);
  return out;
}

void MappedFile::read(std::uint64_t offset, std::span<std::byte> out, const char* what) const {
  require(offset, out.size(), what);
  if (out.empty()) return;
  if (data_ != nullptr) {
    std::memcpy(out.data(), data_ + offset, out.size());
    return;
  }
  std::size_t done = 0;
  while (done < out.size()) {
    const ssize_t got = ::pread(fd_, out.data() + done, out.size() - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw FileError(errno, path_);
    if (got == 0) {
      throw DataFault(path_ + ": offset " + std::to_string(offset) + ": expected " + std::to_string(out.size()) +
                      " bytes of " + what + ", found " + std::to_string(done) +
                      ": the file was cut short after it was opened with " + std::to_string(size_) + " bytes");
    }
    done += static_cast<std::size_t>(got);
  }
}

}  // namespace prism
