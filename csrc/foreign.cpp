#include "foreign.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

namespace prism {
namespace {

constexpr std::uint64_t kScanTokens = std::uint64_t{1} << 20;    // tokens looked at in one piece
constexpr std::uint64_t kIndexEntries = std::uint64_t{1} << 16;  // index entries read in one piece
constexpr std::size_t kLlmcHeader = 1024;
constexpr std::size_t kMegatronHeader = 34;
constexpr char kMegatronMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};
constexpr char kNpyMagic[6] = {'\x93', 'N', 'U', 'M', 'P', 'Y'};
constexpr std::uint32_t kLlmcMagicU16 = 20240520;
constexpr std::uint32_t kLlmcMagicU32 = 20240801;

std::string n(std::uint64_t value) { return std::to_string(value); }

[[noreturn]] void fault(const std::string& path, std::uint64_t offset, const std::string& expected,
                        const std::string& found) {
  throw DataFault(path + ": offset " + n(offset) + ": expected " + expected + ", found " + found);
}

bool ends_with(std::string_view text, std::string_view tail) {
  return text.size() >= tail.size() && text.substr(text.size() - tail.size()) == tail;
}

bool exists(const std::string& path) {
  struct stat info{};
  return ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

template <typename T>
T load(const MappedFile& file, std::uint64_t offset, const char* what) {
  T value;
  file.read(offset, std::as_writable_bytes(std::span(&value, 1)), what);
  return value;
}

bool starts_with(const MappedFile& file, std::span<const char> magic) {
  if (file.size() < magic.size()) return false;
  std::vector<char> head(magic.size());
  file.read(0, std::as_writable_bytes(std::span(head)), "magic");
  return std::equal(magic.begin(), magic.end(), head.begin());
}

/// Calls `visit(i, value)` for `count` values of T at `offset`, which need not be aligned.
template <typename T, typename Visit>
void each(const MappedFile& file, std::uint64_t offset, std::uint64_t count, const char* what, Visit&& visit) {
  std::vector<T> piece(std::min(count, kIndexEntries));
  for (std::uint64_t done = 0; done < count;) {
    const std::uint64_t take = std::min(count - done, kIndexEntries);
    file.read(offset + done * sizeof(T), std::as_writable_bytes(std::span(piece).first(take)), what);
    for (std::uint64_t i = 0; i < take; ++i) visit(done + i, piece[i]);
    done += take;
  }
}

/// 'PREFIX' of PREFIX.idx or PREFIX.bin.
std::string without_suffix(const std::string& path) { return path.substr(0, path.size() - 4); }

}  // namespace

/// Builds shards; the one class that may fill them from outside.
class ForeignReader {
 public:
  ForeignReader(const std::string& path, const OpenOptions& options) : path_(path), options_(options) {
    shard_->own_offsets_.push_back(0);
  }

  std::shared_ptr<Shard> open() {
    std::string format = options_.format;
    if (format == "prism") return Shard::open(path_, options_.access);
    if (format == "megatron" || (format.empty() && looks_megatron())) return megatron();
    shard_->file_ = std::make_shared<const MappedFile>(path_, options_.access);
    if (format.empty()) format = told_by_content();
    if (format == "prism") return Shard::open(path_, options_.access);
    if (format == "llmc") return llmc();
    if (format == "datatrove") return datatrove();
    if (format == "npy") return npy();
    if (format == "raw") return raw();
    throw std::invalid_argument("format '" + format +
                                "': expected prism, llmc, megatron, datatrove, npy or raw, or none to tell by content");
  }

 private:
  bool looks_megatron() const {
    if (ends_with(path_, ".idx")) return true;
    if (!ends_with(path_, ".bin") || !exists(without_suffix(path_) + ".idx")) return false;
    return starts_with(MappedFile(without_suffix(path_) + ".idx", options_.access), kMegatronMagic);
  }

  std::string told_by_content() const {
    const MappedFile& file = *shard_->file_;
    constexpr std::string_view prism = "PRSMSHRD";
    if (starts_with(file, prism) || ends_with(path_, ".prsh")) return "prism";
    if (starts_with(file, kNpyMagic)) return "npy";
    if (file.size() >= 4) {
      const auto magic = load<std::uint32_t>(file, 0, "magic");
      if (magic == kLlmcMagicU16 || magic == kLlmcMagicU32) return "llmc";
    }
    if (ends_with(path_, ".ds") && exists(path_ + ".index")) return "datatrove";
    if (options_.width != 0) return "raw";
    fault(path_, 0,
          "a prism_shard.v1, llm.c .bin, Megatron .idx + .bin, datatrove .ds + .ds.index or .npy file (headerless "
          "tokens need their dtype named)",
          file.size() == 0 ? "an empty file" : "none of them");
  }

  std::shared_ptr<Shard> llmc() {
    const MappedFile& file = *shard_->file_;
    if (file.size() < kLlmcHeader) {
      fault(path_, file.size(), "an llm.c header of 1024 bytes", "a file of " + n(file.size()) + " bytes");
    }
    const auto magic = load<std::uint32_t>(file, 0, "header");
    const auto version = load<std::uint32_t>(file, 4, "header");
    const auto count = load<std::uint32_t>(file, 8, "header");
    if (magic == kLlmcMagicU16 && version == 1) {
      region("llmc", 2, kLlmcHeader);
    } else if (magic == kLlmcMagicU32 && version == 7) {
      region("llmc", 4, kLlmcHeader);
    } else {
      fault(path_, 0, "llm.c magic 20240520 version 1, or 20240801 version 7", n(magic) + " version " + n(version));
    }
    require_size(count);
    return by_delimiter();
  }

  std::shared_ptr<Shard> npy() {
    const MappedFile& file = *shard_->file_;
    const auto major = load<std::uint8_t>(file, 6, "npy version");
    if (major < 1 || major > 3) fault(path_, 6, "npy version 1, 2 or 3", n(major));
    const std::uint64_t prefix = major == 1 ? 10 : 12;
    const std::uint64_t length = major == 1 ? load<std::uint16_t>(file, 8, "npy header length")
                                            : load<std::uint32_t>(file, 8, "npy header length");
    if (length > file.size()) {
      fault(path_, 8, "an npy header inside the file of " + n(file.size()) + " bytes", "a length of " + n(length));
    }
    std::string header(length, '\0');
    file.read(prefix, std::as_writable_bytes(std::span(header)), "npy header");
    const auto field = [&](std::string_view key) -> std::string_view {
      const std::size_t at = header.find(key);
      const std::size_t colon = at == std::string::npos ? at : header.find(':', at);
      const std::size_t value = colon == std::string::npos ? colon : header.find_first_not_of(' ', colon + 1);
      if (value == std::string::npos) fault(path_, prefix, "an npy header with " + std::string(key), "none");
      return std::string_view(header).substr(value);
    };
    unsigned width = 0;
    const std::string_view descr = field("'descr'");
    for (const std::string_view known : {"'|u1'", "'<u2'", "'<u4'", "'<i4'", "'<u8'", "'<i8'"}) {
      if (descr.substr(0, known.size()) == known) width = static_cast<unsigned>(known[3] - '0');
    }
    if (width == 0) {
      fault(path_, prefix, "an array of u1, u2, u4, u8, i4 or i8, little-endian", std::string(descr.substr(0, 8)));
    }
    std::uint64_t count = 0;
    const std::string_view shape = field("'shape'");
    std::size_t digits = 0;
    while (digits + 1 < shape.size() && digits < 18 && shape[digits + 1] >= '0' && shape[digits + 1] <= '9') {
      count = count * 10 + static_cast<std::uint64_t>(shape[++digits] - '0');
    }
    if (shape.front() != '(' || digits == 0 || shape.substr(digits + 1, 2) != ",)") {
      fault(path_, prefix, "an array of one dimension", "shape " + std::string(shape.substr(0, shape.find(')') + 1)));
    }
    region("npy", width, prefix + length);
    require_size(count);
    return by_delimiter();
  }

  std::shared_ptr<Shard> raw() {
    if (options_.width == 0) throw std::invalid_argument(path_ + ": headerless tokens need their dtype named");
    region("raw", options_.width, 0);
    return by_delimiter();
  }

  std::shared_ptr<Shard> datatrove() {
    const MappedFile index(path_ + ".index", options_.access);
    if (index.size() % 8 != 0) {
      fault(index.path(), index.size() / 8 * 8, "u64 document ends", "a file of " + n(index.size()) + " bytes");
    }
    const std::uint64_t records = index.size() / 8;
    const std::uint64_t size = shard_->file_->size();
    const std::uint64_t tokens = records == 0 ? 0 : load<std::uint64_t>(index, index.size() - 8, "document ends");
    unsigned width = options_.width;
    if (width == 0) width = tokens != 0 && tokens <= size / 4 && tokens * 4 == size ? 4 : 2;
    region("datatrove", width, 0);
    require_size(tokens);
    std::vector<std::uint64_t> ends(records);
    std::uint64_t before = 0;
    each<std::uint64_t>(index, 0, records, "document ends", [&](std::uint64_t i, std::uint64_t end) {
      if (end < before || end > tokens) {
        fault(index.path(), i * 8, "document ends rising from " + n(before) + " to " + n(tokens), n(end));
      }
      ends[i] = before = end;
    });
    return by_index(ends);
  }

  std::shared_ptr<Shard> megatron() {
    if (!ends_with(path_, ".idx") && !ends_with(path_, ".bin")) {
      throw std::invalid_argument(path_ + ": expected the .idx or the .bin file of a Megatron pair");
    }
    const MappedFile index(without_suffix(path_) + ".idx", options_.access);
    const std::string& where = index.path();
    if (!starts_with(index, kMegatronMagic)) fault(where, 0, "the magic MMIDIDX of a Megatron index", "something else");
    const auto version = load<std::uint64_t>(index, 9, "index header");
    if (version != 1) fault(where, 9, "index version 1", n(version));
    const auto code = load<std::uint8_t>(index, 17, "index header");
    const auto sequences = load<std::uint64_t>(index, 18, "index header");
    const auto bounds = load<std::uint64_t>(index, 26, "index header");  // one more than there are documents
    unsigned width = 0;
    switch (code) {
      case 1:
        width = 1;
        break;
      case 8:
        width = 2;
        break;
      case 4:
        width = 4;
        break;
      case 5:
        width = 8;
        break;
      default:
        fault(where, 17, "dtype code 1 (u8), 8 (u16), 4 (i32) or 5 (i64)", n(code));
    }
    const std::uint64_t room = index.size() - kMegatronHeader;
    // Each sequence takes 12 bytes (13 in multimodal indices) and each document bound 8.
    if (sequences > room / 12 || bounds > room / 8 ||
        (sequences * 12 + bounds * 8 != room && sequences * 13 + bounds * 8 != room)) {
      fault(where, 18, "an index of the " + n(index.size()) + " bytes that it has",
            n(sequences) + " sequences and " + n(bounds) + " document bounds");
    }
    shard_->file_ = std::make_shared<const MappedFile>(without_suffix(path_) + ".bin", options_.access);
    path_ = shard_->file_->path();

    const std::uint64_t lengths_at = kMegatronHeader;
    const std::uint64_t pointers_at = lengths_at + sequences * 4;
    const std::uint64_t bounds_at = pointers_at + sequences * 8;
    std::vector<std::uint64_t> ends(sequences + 1);  // tokens before each sequence
    each<std::int32_t>(index, lengths_at, sequences, "sequence lengths", [&](std::uint64_t i, std::int32_t length) {
      if (length < 0) fault(where, lengths_at + i * 4, "a sequence length of 0 or more", std::to_string(length));
      ends[i + 1] = ends[i] + static_cast<std::uint64_t>(length);
    });
    each<std::uint64_t>(index, pointers_at, sequences, "sequence offsets", [&](std::uint64_t i, std::uint64_t at) {
      if (at != ends[i] * width) {
        fault(where, pointers_at + i * 8, "sequences end to end, sequence " + n(i) + " at byte " + n(ends[i] * width),
              n(at));
      }
    });
    region("megatron", width, 0);
    require_size(ends.back());
    std::vector<std::uint64_t> documents;
    documents.reserve(bounds);
    std::uint64_t before = 0;
    each<std::uint64_t>(index, bounds_at, bounds, "document bounds", [&](std::uint64_t i, std::uint64_t bound) {
      if (bound < before || bound > sequences || (i == 0 && bound != 0)) {
        fault(where, bounds_at + i * 8, "document bounds rising from 0 to " + n(sequences), n(bound));
      }
      if (i != 0) documents.push_back(ends[bound]);
      before = bound;
    });
    if (before != sequences) {
      fault(where, bounds_at, "document bounds that reach all " + n(sequences) + " sequences", n(before));
    }
    return by_index(documents);
  }

  /// Declares the token region: from `offset` to the end of the file.
  void region(const char* format, unsigned width, std::uint64_t offset) {
    const std::uint64_t size = shard_->file_->size();
    if (width != 1 && width != 2 && width != 4 && width != 8) {
      throw std::invalid_argument("token width " + n(width) + ": expected 1, 2, 4 or 8 bytes");
    }
    if (offset > size) fault(path_, size, "a header of " + n(offset) + " bytes", "a file of " + n(size) + " bytes");
    if (offset % width != 0)
      fault(path_, offset, "tokens at a multiple of " + n(width) + " bytes", "offset " + n(offset));
    if ((size - offset) % width != 0) {
      fault(path_, size - (size - offset) % width, "tokens of " + n(width) + " bytes to the end of the file",
            n((size - offset) % width) + " bytes left over");
    }
    shard_->format_ = format;
    shard_->width_ = width;
    shard_->data_offset_ = offset;
    shard_->stored_ = (size - offset) / width;
  }

  void require_size(std::uint64_t tokens) const {
    if (tokens == shard_->stored_) return;
    fault(path_, shard_->file_->size(), n(tokens) + " tokens of " + n(shard_->width_) + " bytes, as the header says",
          n(shard_->stored_));
  }

  std::shared_ptr<Shard> by_index(const std::vector<std::uint64_t>& ends) {
    const auto end_of_text = options_.end_of_text;
    std::vector<std::byte> scratch;
    const auto is_delimiter = [&](std::uint64_t token) {
      return with_token_type(shard_->width_, shard_->token_bytes(token, 1, scratch),
                             [&](const auto* id) { return *id == *end_of_text; });
    };
    std::uint64_t start = 0;
    reserve(ends.size());
    for (const std::uint64_t end : ends) {
      std::uint64_t first = start;
      std::uint64_t last = end;
      if (end_of_text) {
        if (first < last && is_delimiter(last - 1)) --last;
        if (first < last && is_delimiter(first)) ++first;
      }
      record(first, last);
      start = end;
    }
    return finish();
  }

  /// Documents between end-of-text ids. A file that begins with one has a document after each; any other has one
  /// before each, and what follows the last.
  std::shared_ptr<Shard> by_delimiter() {
    const std::uint64_t stored = shard_->stored_;
    if (!options_.end_of_text) {
      if (!options_.one_record) {
        fault(path_, 0,
              "an end-of-text id to tell documents apart, or the word that all is one record: name one (--eot, "
              "end_of_text=), or say so (--one-record, one_record=True)",
              "neither");
      }
      reserve(1);
      record(0, stored);
      return finish();
    }
    const std::uint64_t delimiter = *options_.end_of_text;
    std::vector<std::byte> scratch;
    std::uint64_t found = 0;
    std::uint64_t start = 0;
    bool leading = false;
    for (std::uint64_t done = 0; done < stored;) {
      const std::uint64_t take = std::min(stored - done, kScanTokens);
      with_token_type(shard_->width_, shard_->token_bytes(done, take, scratch), [&](const auto* ids) {
        using Id = std::remove_cvref_t<decltype(*ids)>;
        if (delimiter > static_cast<Id>(-1)) return;  // no id of this width can be it
        for (const auto* at = ids; (at = std::find(at, ids + take, static_cast<Id>(delimiter))) != ids + take; ++at) {
          const std::uint64_t token = done + static_cast<std::uint64_t>(at - ids);
          if (token == 0) leading = true;
          if (found != 0 || !leading) record(start, token);
          start = token + 1;
          ++found;
        }
      });
      done += take;
    }
    if (found == 0 && stored != 0) {
      fault(path_, shard_->data_offset_, "end-of-text id " + n(delimiter) + " between documents",
            "none in " + n(stored) + " tokens: name the right id, or say that all is one record");
    }
    if (leading || start < stored) record(start, stored);
    return finish();
  }

  void reserve(std::size_t records) {
    shard_->starts_.reserve(records);
    shard_->own_offsets_.reserve(records + 1);
  }

  void record(std::uint64_t start, std::uint64_t end) {
    shard_->starts_.push_back(start);
    shard_->own_offsets_.push_back(shard_->own_offsets_.back() + (end - start));
  }

  std::shared_ptr<Shard> finish() {
    shard_->offsets_ = shard_->own_offsets_;
    shard_->records_ = shard_->starts_.size();
    shard_->tokens_ = shard_->own_offsets_.back();
    if (options_.end_of_text && *options_.end_of_text < kNoId) {
      shard_->stamp_.end_of_text = static_cast<std::uint32_t>(*options_.end_of_text);
    }
    return shard_;
  }

  std::string path_;
  const OpenOptions& options_;
  std::shared_ptr<Shard> shard_{new Shard()};
};

std::shared_ptr<Shard> open_shard(const std::string& path, const OpenOptions& options) {
  return ForeignReader(path, options).open();
}

}  // namespace prism
