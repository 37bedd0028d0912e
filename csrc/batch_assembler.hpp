// An order of rows -> padded token blocks: one record a row, end-of-text first, padded on the right to the width of its
// micro-batch. Assembled ahead of the consumer by threads of our own, into buffers that the caller lends and that are
// written again and again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "read_ahead.hpp"
#include "shard.hpp"
#include "widen.hpp"

namespace prism {

// Which stretch of which record a row holds: tokens [start, start + length). All empty: row r is the whole record r.
struct RowTable {
  std::span<const std::int64_t> record;
  std::span<const std::int64_t> start;
  std::span<const std::int64_t> length;
};

// Micro-batch k is rows[starts[k] .. starts[k + 1]), or `micro_batch` rows each where `starts` is empty.
struct RowOrder {
  std::span<const std::int64_t> rows;
  std::span<const std::int64_t> starts;
  std::uint64_t micro_batch = 0;

  std::uint64_t micro_batches() const {
    return starts.empty() ? (rows.size() + micro_batch - 1) / micro_batch : starts.size() - 1;
  }
};

// Everything a block is written to. All of it stays the caller's and must outlive the assembler.
struct BlockBuffers {
  IdBuffers ids;                       // [slots, capacity]; a block takes its first rows x width, row-major
  std::span<std::int64_t> lengths;     // [slots, max_rows]: positions in use, the first (context) included
  std::span<std::int32_t> cu_lengths;  // [slots, max_rows + 1]: running sum of lengths
  std::span<std::int64_t> bytes;       // [slots, max_rows]: UTF-8 bytes of the row's targets
  std::uint64_t capacity = 0;
  std::uint64_t max_rows = 0;
};

struct Block {
  std::uint64_t micro_batch = 0;  // number in the order, over all ranks
  std::uint64_t slot = 0;
  std::uint64_t rows = 0;
  std::uint64_t width = 0;
  std::uint64_t targets = 0;  // positions with a target
  std::uint64_t bytes = 0;    // UTF-8 bytes of these targets
};

class BatchAssembler {
 public:
  struct Config {
    std::uint64_t rank = 0;  // takes micro-batches rank, rank + world, ...
    std::uint64_t world = 1;
    std::uint64_t prefetch = 0;  // blocks assembled ahead; 0: no threads, all in the consumer's own
    std::uint64_t threads = 1;
    std::uint64_t start_step = 0;  // of this rank
    std::int64_t end_of_text = 0;
  };
  static std::uint64_t slots(std::uint64_t prefetch) { return ReadAhead::slots(prefetch); }

  BatchAssembler(std::vector<std::shared_ptr<const Shard>> shards, std::shared_ptr<const TokenTable> table,
                 RowTable table_of_rows, RowOrder order, BlockBuffers buffers, Config config);
  ~BatchAssembler();
  BatchAssembler(const BatchAssembler&) = delete;
  BatchAssembler& operator=(const BatchAssembler&) = delete;

  // See ReadAhead::forked.
  struct Deleter {
    void operator()(BatchAssembler* assembler) const;
  };

  std::uint64_t steps() const { return steps_; }  // of this rank, the same on every rank

  using Wait = ReadAhead::Wait;
  // Waits up to `milliseconds` for the next block. What went wrong while one was assembled is thrown in its place.
  Wait next(Block& block, unsigned milliseconds);

 private:
  struct Row {
    const Shard* shard;
    std::uint64_t record;  // in its shard
    std::uint64_t begin;   // in the shard's tokens, at the context if the row starts inside its record
    std::uint64_t length;  // tokens of text
    bool inside;           // the row starts inside its record
    bool whole;            // the row is the whole record
  };
  struct Slot {
    Block block;
    std::vector<Row> rows;           // of the block; kept for its memory
    std::vector<std::byte> scratch;  // what pread reads into; the same
  };

  Row find_row(std::int64_t number) const;
  void assemble(std::uint64_t step, std::size_t slot);
  template <class Token>
  void fill(Slot& slot, const TokenBuffers<Token>& ids);
  std::optional<std::span<const std::int64_t>> rows_of(std::uint64_t micro_batch) const;
  void look_ahead(std::uint64_t step) const;
  template <class Touch>
  void for_rows_of(std::uint64_t step, const Touch& touch) const;

  std::vector<std::shared_ptr<const Shard>> shards_;
  std::vector<std::uint64_t> first_record_;  // [shards + 1]
  std::shared_ptr<const TokenTable> table_;
  RowTable table_of_rows_;
  RowOrder order_;
  BlockBuffers buffers_;
  Config config_;
  std::uint64_t steps_ = 0;
  std::vector<Slot> slots_;
  std::unique_ptr<ReadAhead> ahead_;  // last: its threads use all of the above
};

}  // namespace prism
