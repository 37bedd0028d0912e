// A shard: a read-only file of token records. `prism_shard.v1` (docs/shard-format.md) is parsed, validated and written
// here and nowhere else; csrc/foreign fills the same class from formats that other tools write.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checksum.hpp"
#include "mapped_file.hpp"

namespace prism {

inline constexpr std::uint32_t kNoId = 0xFFFFFFFFu;  // "no end-of-text id"

/// The bytes each token id stands for: id i is bytes[offsets[i], offsets[i + 1]). Special tokens stand for none.
class TokenTable {
 public:
  TokenTable(std::vector<std::uint64_t> offsets, std::vector<std::byte> bytes);
  std::uint64_t n_vocab() const { return lengths_.size(); }
  std::uint64_t length(std::uint64_t id) const { return lengths_[id]; }
  std::span<const std::byte> bytes(std::uint64_t id) const { return {bytes_.data() + offsets_[id], length(id)}; }
  /// UTF-8 bytes of each record; `tokens` holds the records end to end. Throws on an id outside the vocabulary.
  void count(std::span<const std::uint32_t> tokens, std::span<const std::uint64_t> lengths,
             std::span<std::uint64_t> bytes) const;
  /// The bytes of `tokens`, end to end. Throws on an id outside the vocabulary.
  std::string decode(std::span<const std::uint32_t> tokens) const;

 private:
  std::vector<std::uint16_t> lengths_;  // a quarter of the offsets: what is looked up for every token stays in cache
  std::vector<std::uint64_t> offsets_;
  std::vector<std::byte> bytes_;
};

/// What a shard says about the tokenizer that made it. Zero fingerprint and empty name: unknown (foreign formats).
struct TokenizerStamp {
  std::string name;                            // at most 64 bytes of UTF-8
  std::array<std::uint8_t, 32> fingerprint{};  // sha256, see prism_fast/data/tokenizers.py
  std::uint32_t n_vocab = 0;                   // 0: unknown
  std::uint32_t end_of_text = kNoId;
};

/// Tokens [start, start + length) of the token region.
struct RecordRange {
  std::uint64_t start;
  std::uint64_t length;
};

class Shard {
 public:
  /// Opens a `prism_shard.v1` file: sizes, header and footer are checked, nothing else is read.
  static std::shared_ptr<Shard> open(const std::string& path, Access access = Access::automatic);

  const std::string& path() const { return file_->path(); }
  const std::string& format() const { return format_; }
  bool mapped() const { return file_->mapped(); }
  unsigned token_width() const { return width_; }  // bytes per token: 1, 2, 4 or 8
  std::uint64_t records() const { return records_; }
  std::uint64_t tokens() const { return tokens_; }         // in records; delimiters of foreign formats are not counted
  std::uint64_t stored_tokens() const { return stored_; }  // in the file
  bool knows_utf8_bytes() const { return knows_bytes_; }
  std::uint64_t utf8_bytes_total() const { return total_bytes_; }
  const TokenizerStamp& tokenizer() const { return stamp_; }
  std::uint64_t file_bytes() const { return file_->size(); }

  /// Where record `i` lies. Throws DataFault when the offsets of the file contradict themselves there.
  RecordRange range(std::uint64_t i) const;
  std::uint64_t utf8_bytes(std::uint64_t i) const { return utf8_bytes_[i]; }

  std::span<const std::uint64_t> offsets() const { return offsets_; }        // [records + 1], cumulative lengths
  std::span<const std::uint32_t> utf8_bytes() const { return utf8_bytes_; }  // [records], empty when unknown
  std::vector<std::uint64_t> doc_ids() const;                                // [records], empty when unknown

  /// Tokens [start, start + count) as stored (`token_width()` bytes each), in place or in `scratch`.
  std::span<const std::byte> token_bytes(std::uint64_t start, std::uint64_t count,
                                         std::vector<std::byte>& scratch) const {
    return file_->bytes(data_offset_ + start * width_, count * width_, scratch, "tokens");
  }

  /// Has the processor bring near what `range(i)` and `utf8_bytes(i)` will read; the record's tokens from `from` on.
  /// Hints: nothing is raised.
  void prefetch_range(std::uint64_t i) const;
  void prefetch_tokens(std::uint64_t i, std::uint64_t from) const;

  /// Fills `utf8_bytes()` of a foreign file from the table. Throws DataFault on an id outside it.
  void count_utf8_bytes(const TokenTable& table);

  /// Reads the whole file: checksums, padding, offsets, totals, ids below the vocabulary and, with a table, every
  /// record's UTF-8 length. Throws DataFault at the first contradiction.
  void verify(const TokenTable* table) const;

  /// Bytes that name the content. Header and footer as stored: they hold every count and section checksum. Of foreign
  /// formats: the layout, checksums of all record lengths, and of the first MiB of tokens.
  std::vector<std::byte> seal() const;

 private:
  friend class ForeignReader;
  Shard() = default;
  [[noreturn]] void fault(std::uint64_t offset, const std::string& expected, const std::string& found) const;
  std::uint64_t count_record(std::uint64_t i, const TokenTable& table, std::vector<std::byte>& scratch) const;

  std::shared_ptr<const MappedFile> file_;
  std::string format_;
  unsigned width_ = 0;
  std::uint64_t records_ = 0;
  std::uint64_t tokens_ = 0;
  std::uint64_t stored_ = 0;
  std::uint64_t data_offset_ = 0;  // byte offset of token 0
  std::uint64_t total_bytes_ = 0;
  bool knows_bytes_ = false;
  TokenizerStamp stamp_;

  // Views into the mapping where there is one, otherwise into the vectors below.
  std::span<const std::uint64_t> offsets_;
  std::span<const std::uint32_t> utf8_bytes_;
  std::vector<std::uint64_t> own_offsets_;
  std::vector<std::uint32_t> own_utf8_bytes_;
  std::vector<std::uint64_t> starts_;  // [records] where delimiters lie between records; empty: offsets_ serve
};

/// Writes one shard: to a temporary name beside `path`, then fsync and rename, so `path` is whole or absent. Tokens
/// stream to the file; 20 bytes a record are held until `finish()`. Destroyed before that, it removes what it wrote.
class ShardWriter {
 public:
  ShardWriter(std::string path, TokenizerStamp tokenizer);
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  /// Appends records: `tokens` holds them end to end, `lengths` (tokens), `utf8_bytes` and `doc_ids` one each.
  void add(std::span<const std::uint32_t> tokens, std::span<const std::uint64_t> lengths,
           std::span<const std::uint64_t> utf8_bytes, std::span<const std::uint64_t> doc_ids);
  void finish();

  std::uint64_t records() const { return utf8_bytes_.size(); }
  std::uint64_t tokens() const { return offsets_.back(); }
  std::uint64_t utf8_bytes_total() const { return total_bytes_; }

 private:
  void write(std::span<const std::byte> data);
  void flush();
  void pad();
  std::uint64_t section(std::span<const std::byte> data);

  std::string path_;
  std::string temporary_;
  TokenizerStamp stamp_;
  unsigned width_;
  int fd_ = -1;
  std::uint64_t written_ = 0;  // bytes handed to write(), the file position once flushed
  std::vector<std::byte> buffer_;
  std::vector<std::byte> narrow_;
  std::vector<std::uint64_t> offsets_{0};
  std::vector<std::uint32_t> utf8_bytes_;
  std::vector<std::uint64_t> doc_ids_;
  std::uint64_t total_bytes_ = 0;
  Xxh64 tokens_hash_;
};

/// Calls `body(const T*)` with the unsigned type of `width` bytes over `data`.
template <typename Body>
decltype(auto) with_token_type(unsigned width, std::span<const std::byte> data, Body&& body) {
  switch (width) {
    case 1:
      return body(reinterpret_cast<const std::uint8_t*>(data.data()));
    case 2:
      return body(reinterpret_cast<const std::uint16_t*>(data.data()));
    case 4:
      return body(reinterpret_cast<const std::uint32_t*>(data.data()));
    default:
      return body(reinterpret_cast<const std::uint64_t*>(data.data()));
  }
}

}  // namespace prism
