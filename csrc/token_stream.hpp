// The packed stream of docs/numerics.md: for every document the end-of-text token and then its text; rows of `seq_len`
// that overlap by one, so that each element is a target exactly once. Read ahead by one thread, off the GIL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "read_ahead.hpp"
#include "shard.hpp"
#include "widen.hpp"

namespace prism {

/// `tokens`: the ids as stored. `bytes`: every token replaced by the bytes that it stands for, ids 0..255.
enum class Basis { tokens, bytes };

using Shards = std::vector<std::shared_ptr<const Shard>>;

/// What a stretch of the stream holds. A scored element is a text element; end-of-text is special and has 0 bytes.
struct StreamCounts {
  std::uint64_t bytes = 0;
  std::uint64_t scored = 0;
  std::uint64_t special = 0;
};

/// A position in the stream that only moves forward: O(1) memory, no table of positions.
class StreamCursor {
 public:
  StreamCursor(const Shards& shards, const TokenTable& table, Basis basis, std::int64_t end_of_text)
      : shards_(shards), table_(table), basis_(basis), end_of_text_(end_of_text) {}

  /// Writes the next `count` elements to both places; returns how many there were (fewer only at the end of the
  /// stream). Two places because a row's tokens are the row's targets one column further.
  template <class Token>
  std::uint64_t pull(Token* tokens, Token* targets, std::uint64_t count);
  /// Passes over up to `count` elements without reading tokens of documents that lie wholly inside.
  std::uint64_t skip(std::uint64_t count);
  /// What was passed since the last call.
  StreamCounts take_counts();

 private:
  bool enter_document();
  void leave_document();
  void settle();
  std::span<const std::byte> upcoming();
  template <class Token>
  std::uint64_t pull_tokens(Token* tokens, Token* targets, std::uint64_t count);
  template <class Token>
  std::uint64_t pull_bytes(Token* tokens, Token* targets, std::uint64_t count);
  [[noreturn]] void bad_id(const Shard& shard, std::uint64_t token, std::uint64_t id) const;

  const Shards& shards_;
  const TokenTable& table_;
  Basis basis_;
  std::int64_t end_of_text_;
  std::size_t shard_ = 0;
  std::uint64_t record_ = 0;
  bool inside_ = false;  // the current record's end-of-text is out, its text is not finished
  RecordRange range_{};
  std::uint64_t token_ = 0;         // tokens of the record that are out
  std::uint64_t within_ = 0;        // byte basis: bytes of the next token that are out
  std::uint64_t settled_ = 0;       // token basis: tokens of the record whose bytes are counted
  std::uint64_t record_bytes_ = 0;  // bytes of the record that are counted
  StreamCounts counts_;
  std::span<const std::byte> window_;  // stored tokens of the shard: all of them when mapped, else a piece
  std::uint64_t window_begin_ = 0;     // number of its first
  std::vector<std::byte> window_scratch_;
  std::vector<std::byte> settle_scratch_;
};

struct StreamPlan {
  std::uint64_t rows = 0;     // rows that the batches hold, over all ranks
  std::uint64_t batches = 0;  // over all ranks
  std::uint64_t documents = 0;
  std::uint64_t covered_documents = 0;  // whose end-of-text lies in a row
  std::uint64_t covered_bytes = 0, covered_tokens = 0;
  std::uint64_t tail_bytes = 0, tail_tokens = 0;
  std::uint64_t special_tokens = 0;  // end-of-text targets
};

struct StreamBatch {
  std::uint64_t index = 0;  // over all ranks
  std::size_t slot = 0;
  std::uint64_t rows = 0;
  std::uint64_t width = 0;      // seq_len
  std::uint64_t documents = 0;  // documents whose end-of-text is read here for the first time
  StreamCounts counts;          // of the targets
};

class TokenStream {
 public:
  struct Config {
    std::uint64_t seq_len = 0;
    std::uint64_t batch_size = 0;
    std::uint64_t rank = 0;
    std::uint64_t world = 1;
    std::uint64_t prefetch = 2;
    std::uint64_t start_batch = 0;  // of this rank
    Basis basis = Basis::tokens;
    std::int64_t end_of_text = 0;
  };
  static std::uint64_t slots(std::uint64_t prefetch) { return ReadAhead::slots(prefetch); }

  /// `buffers`: [slots(prefetch), batch_size, seq_len] each, owned by the caller, alive as long as this.
  TokenStream(Shards shards, std::shared_ptr<const TokenTable> table, Config config, IdBuffers buffers);
  ~TokenStream();
  TokenStream(const TokenStream&) = delete;
  TokenStream& operator=(const TokenStream&) = delete;

  /// See ReadAhead::forked.
  struct Deleter {
    void operator()(TokenStream* stream) const;
  };

  const StreamPlan& plan() const { return plan_; }
  std::uint64_t batches() const { return batches_; }  // of this rank

  using Wait = ReadAhead::Wait;
  /// Waits up to `milliseconds` for the next batch. Rethrows what ended the reader.
  Wait next(StreamBatch& batch, unsigned milliseconds);

 private:
  StreamPlan make_plan() const;
  void read(std::uint64_t local, std::size_t slot);
  template <class Token>
  void fill(StreamBatch& batch, const TokenBuffers<Token>& buffers);

  Shards shards_;
  std::shared_ptr<const TokenTable> table_;
  Config config_;
  IdBuffers buffers_;
  StreamPlan plan_;
  std::uint64_t batches_ = 0;
  std::vector<StreamBatch> ring_;

  // Where the reading is; whoever reads a batch has them alone.
  StreamCursor cursor_;
  std::int64_t carry_ = 0;  // last element of the row before: the first of the next
  std::uint64_t position_;  // global batch that `carry_` opens

  std::unique_ptr<ReadAhead> ahead_;  // last: its thread uses all of the above
};

}  // namespace prism
