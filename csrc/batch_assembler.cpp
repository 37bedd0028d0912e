#include "batch_assembler.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace prism {
namespace {

// The words are put together only when they are needed: they took a third of the time of a small block.
template <class Words>
void require(bool holds, const Words& words) {
  if (!holds) throw std::invalid_argument(words());
}

}  // namespace

BatchAssembler::BatchAssembler(std::vector<std::shared_ptr<const Shard>> shards,
                               std::shared_ptr<const TokenTable> table, RowTable table_of_rows, RowOrder order,
                               BlockBuffers buffers, Config config)
    : shards_(std::move(shards)),
      first_record_{0},
      table_(std::move(table)),
      table_of_rows_(table_of_rows),
      order_(order),
      buffers_(buffers),
      config_(config) {
  for (const auto& shard : shards_) {
    require(shard->knows_utf8_bytes(),
            [&] { return shard->path() + ": its UTF-8 lengths are unknown: open it with a tokenizer"; });
    first_record_.push_back(first_record_.back() + shard->records());
  }
  require(order_.micro_batch > 0 || !order_.starts.empty(), [] { return "micro_batch must be at least 1 row"; });
  require(table_of_rows_.record.size() == table_of_rows_.start.size() &&
              table_of_rows_.record.size() == table_of_rows_.length.size(),
          [] { return "the columns of the row table differ in size"; });
  require(config_.world > 0 && config_.rank < config_.world, [&] {
    return "rank " + std::to_string(config_.rank) + " is not below world " + std::to_string(config_.world);
  });
  require(table_->n_vocab() <= static_cast<std::uint64_t>(std::numeric_limits<std::int32_t>::max()),
          [&] { return "a vocabulary of " + std::to_string(table_->n_vocab()) + " ids does not fit 32-bit tokens"; });
  require(buffers_.capacity <= static_cast<std::uint64_t>(std::numeric_limits<std::int32_t>::max()), [&] {
    return "a block of " + std::to_string(buffers_.capacity) +
           " tokens: cu_seqlens can count to 2^31 - 1; set seq_len, or plan smaller micro-batches";
  });
  const std::uint64_t count = slots(config_.prefetch);
  std::visit(
      [&](const auto& ids) {
        require(ids.tokens.size() == count * buffers_.capacity && ids.targets.size() == ids.tokens.size(),
                [] { return "token buffers: expected slots x capacity elements"; });
      },
      buffers_.ids);
  require(buffers_.lengths.size() == count * buffers_.max_rows && buffers_.bytes.size() == buffers_.lengths.size() &&
              buffers_.cu_lengths.size() == count * (buffers_.max_rows + 1),
          [] { return "row buffers: expected slots x max_rows elements"; });
  steps_ = order_.micro_batches() / config_.world;
  require(config_.start_step <= steps_, [&] {
    return "start_step " + std::to_string(config_.start_step) + ": this rank has " + std::to_string(steps_) + " steps";
  });
  slots_.resize(count);
  ReadAhead::Config ahead;
  ahead.steps = steps_;
  ahead.start = config_.start_step;
  ahead.prefetch = config_.prefetch;
  ahead.threads = config_.threads;
  ahead.forked =
      "this TokenLoader was made in another process, and its threads did not survive the fork: make one in this "
      "process";
  ahead_ = std::make_unique<ReadAhead>(std::move(ahead),
                                       [this](std::uint64_t step, std::size_t slot) { assemble(step, slot); });
}

void BatchAssembler::Deleter::operator()(BatchAssembler* assembler) const {
  if (!assembler->ahead_->forked()) delete assembler;
}

BatchAssembler::~BatchAssembler() = default;

// The rows of a micro-batch; nothing where the starts do not ascend.
std::optional<std::span<const std::int64_t>> BatchAssembler::rows_of(std::uint64_t micro_batch) const {
  const std::uint64_t size = order_.rows.size();
  std::uint64_t begin = micro_batch * order_.micro_batch;
  std::uint64_t end = std::min(begin + order_.micro_batch, size);
  if (!order_.starts.empty()) {
    begin = static_cast<std::uint64_t>(order_.starts[micro_batch]);
    end = static_cast<std::uint64_t>(order_.starts[micro_batch + 1]);
  }
  if (begin > end || end > size) return std::nullopt;
  return order_.rows.subspan(begin, end - begin);
}

BatchAssembler::Row BatchAssembler::find_row(std::int64_t number) const {
  const bool identity = table_of_rows_.record.empty();
  const std::uint64_t rows = identity ? first_record_.back() : table_of_rows_.record.size();
  const std::uint64_t row = static_cast<std::uint64_t>(number);
  require(row < rows, [&] { return "the order names row " + std::to_string(number) + " of " + std::to_string(rows); });
  const std::uint64_t record = identity ? row : static_cast<std::uint64_t>(table_of_rows_.record[row]);
  require(record < first_record_.back(), [&] {
    return "row " + std::to_string(row) + " names record " + std::to_string(record) + ", which the shards do not have";
  });
  const auto after = std::upper_bound(first_record_.begin(), first_record_.end(), record);
  const std::size_t index = static_cast<std::size_t>(after - first_record_.begin()) - 1;
  const std::uint64_t local = record - first_record_[index];
  const Shard* const shard = shards_[index].get();
  const RecordRange range = shard->range(local);
  const std::uint64_t start = identity ? 0 : static_cast<std::uint64_t>(table_of_rows_.start[row]);
  const std::uint64_t length = identity ? range.length : static_cast<std::uint64_t>(table_of_rows_.length[row]);
  require(start <= range.length && length <= range.length - start, [&] {
    return "row " + std::to_string(row) + " reaches past the " + std::to_string(range.length) + " tokens of record " +
           std::to_string(record);
  });
  const bool inside = start > 0;
  return {shard, local, range.start + start - (inside ? 1 : 0), length, inside, length == range.length};
}

// Calls `touch(shard, record, start)` for each row of a step to come. What is wrong with it is said in its own turn.
template <class Touch>
void BatchAssembler::for_rows_of(std::uint64_t step, const Touch& touch) const {
  if (step >= steps_) return;
  const auto rows = rows_of(step * config_.world + config_.rank);
  if (!rows) return;
  for (const std::int64_t number : *rows) {
    std::uint64_t record = static_cast<std::uint64_t>(number);
    std::uint64_t start = 0;
    if (!table_of_rows_.record.empty()) {
      const std::uint64_t row = record;
      if (row >= table_of_rows_.record.size()) return;
      record = static_cast<std::uint64_t>(table_of_rows_.record[row]);
      start = static_cast<std::uint64_t>(table_of_rows_.start[row]);
    }
    if (record >= first_record_.back()) return;
    const auto after = std::upper_bound(first_record_.begin(), first_record_.end(), record);
    const std::size_t index = static_cast<std::size_t>(after - first_record_.begin()) - 1;
    touch(*shards_[index], record - first_record_[index], start);
  }
}

// Records come in random order, so each one's place and the beginning of its tokens would be waited for, one after the
// other (measured: half the time of a block). Asked for this early, they are in the cache when their block's turn
// comes.
void BatchAssembler::look_ahead(std::uint64_t step) const {
  for_rows_of(step + 2, [](const Shard& shard, std::uint64_t record, std::uint64_t) { shard.prefetch_range(record); });
  for_rows_of(step + 1, [](const Shard& shard, std::uint64_t record, std::uint64_t start) {
    shard.prefetch_tokens(record, start);
  });
}

void BatchAssembler::assemble(std::uint64_t step, std::size_t number) {
  Slot& slot = slots_[number];
  Block& block = slot.block;
  block = {};
  block.micro_batch = step * config_.world + config_.rank;
  block.slot = number;
  slot.rows.clear();
  const auto numbers = rows_of(block.micro_batch);
  require(numbers.has_value(), [] { return "the starts of the micro-batches do not ascend"; });
  for (const std::int64_t row : *numbers) {
    slot.rows.push_back(find_row(row));
    block.width = std::max(block.width, slot.rows.back().length + 1);
  }
  block.rows = slot.rows.size();
  require(block.rows <= buffers_.max_rows && block.rows * block.width <= buffers_.capacity, [&] {
    return "micro-batch " + std::to_string(block.micro_batch) + " of " + std::to_string(block.rows) + " x " +
           std::to_string(block.width) + " tokens does not fit the buffers";
  });
  look_ahead(step);
  std::visit([&](const auto& ids) { fill<typename std::decay_t<decltype(ids)>::Token>(slot, ids); }, buffers_.ids);
}

template <class Token>
void BatchAssembler::fill(Slot& slot, const TokenBuffers<Token>& ids) {
  Block& block = slot.block;
  const std::span<const Row> rows = slot.rows;
  Token* tokens = ids.tokens.data() + block.slot * buffers_.capacity;
  Token* targets = ids.targets.data() + block.slot * buffers_.capacity;
  std::int64_t* const lengths = buffers_.lengths.data() + block.slot * buffers_.max_rows;
  std::int64_t* const bytes = buffers_.bytes.data() + block.slot * buffers_.max_rows;
  std::int32_t* const cu_lengths = buffers_.cu_lengths.data() + block.slot * (buffers_.max_rows + 1);
  const Token end_of_text = static_cast<Token>(config_.end_of_text);
  cu_lengths[0] = 0;
  for (std::size_t r = 0; r < rows.size(); ++r, tokens += block.width, targets += block.width) {
    const Row& row = rows[r];
    const Shard& shard = *row.shard;
    tokens[0] = end_of_text;
    bytes[r] = row.whole ? static_cast<std::int64_t>(shard.utf8_bytes(row.record)) : 0;
    const auto stored = shard.token_bytes(row.begin, row.length + row.inside, slot.scratch);
    with_token_type(shard.token_width(), stored, [&](const auto* in) {
      const auto check = [&](std::uint64_t id) {
        if (id < table_->n_vocab()) return;
        throw DataFault(shard.path() + ": record " + std::to_string(row.record) + ": expected token ids below " +
                        std::to_string(table_->n_vocab()) + ", found " + std::to_string(id));
      };
      if (row.inside) {
        check(in[0]);
        tokens[0] = static_cast<Token>(*in++);
      }
      check(row.length == 0 ? 0 : widen(in, tokens + 1, targets, row.length));
      if (row.whole) return;
      for (std::uint64_t i = 0; i < row.length; ++i) bytes[r] += static_cast<std::int64_t>(table_->length(in[i]));
    });
    std::fill(tokens + row.length + 1, tokens + block.width, end_of_text);
    std::fill(targets + row.length, targets + block.width, static_cast<Token>(kIgnore));
    lengths[r] = static_cast<std::int64_t>(row.length + 1);
    cu_lengths[r + 1] = cu_lengths[r] + static_cast<std::int32_t>(lengths[r]);
    block.targets += row.length;
    block.bytes += static_cast<std::uint64_t>(bytes[r]);
  }
}

BatchAssembler::Wait BatchAssembler::next(Block& block, unsigned milliseconds) {
  std::size_t slot = 0;
  const Wait wait = ahead_->next(slot, milliseconds);
  if (wait == Wait::ready) block = slots_[slot].block;
  return wait;
}

}  // namespace prism
