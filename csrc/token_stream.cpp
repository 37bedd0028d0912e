#include "token_stream.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace prism {
namespace {

constexpr std::uint64_t kPiece = std::uint64_t{1} << 14;  // tokens read or looked up in one piece: stays in cache
constexpr std::uint64_t kUnknown = ~std::uint64_t{0};

std::uint64_t text_elements(const Shard& shard, Basis basis) {
  return basis == Basis::tokens ? shard.tokens() : shard.utf8_bytes_total();
}

}  // namespace

// ------------------------------------------------------------------------------------------------ cursor

void StreamCursor::bad_id(const Shard& shard, std::uint64_t token, std::uint64_t id) const {
  throw DataFault(shard.path() + ": record " + std::to_string(record_) + ", token " + std::to_string(token) +
                  ": expected an id below " + std::to_string(table_.n_vocab()) + ", found " + std::to_string(id));
}

/// Positions on the text of the next record whose end-of-text is still to come; false at the end of the stream.
bool StreamCursor::enter_document() {
  while (shard_ < shards_.size() && record_ == shards_[shard_]->records()) {
    ++shard_;
    record_ = 0;
    window_ = {};
  }
  if (shard_ == shards_.size()) return false;
  range_ = shards_[shard_]->range(record_);
  inside_ = true;
  token_ = within_ = settled_ = record_bytes_ = 0;
  return true;
}

/// The whole record is out. One that lies within a batch counts the bytes that its shard declares; one that was cut is
/// counted token by token to its end, and must come to the same.
void StreamCursor::leave_document() {
  const Shard& shard = *shards_[shard_];
  const std::uint64_t bytes = shard.utf8_bytes(record_);
  if (settled_ != 0) settle();
  if (basis_ == Basis::tokens && settled_ == 0) {
    counts_.bytes += bytes;
  } else if (bytes != record_bytes_) {
    throw DataFault(shard.path() + ": record " + std::to_string(record_) + ": expected the " + std::to_string(bytes) +
                    " UTF-8 bytes that the shard declares, found tokens of " + std::to_string(record_bytes_));
  }
  inside_ = false;
  ++record_;
}

/// Counts the bytes of the tokens that are out of an unfinished record. Whole records never come here: their length
/// is in the shard, so a batch looks up the tokens of one document only.
void StreamCursor::settle() {
  if (!inside_ || basis_ == Basis::bytes) return;
  const Shard& shard = *shards_[shard_];
  std::uint64_t bytes = 0;
  while (settled_ < token_) {
    const std::uint64_t take = std::min(token_ - settled_, kPiece);
    with_token_type(shard.token_width(), shard.token_bytes(range_.start + settled_, take, settle_scratch_),
                    [&](const auto* ids) {
                      for (std::uint64_t i = 0; i < take; ++i) {
                        if (ids[i] >= table_.n_vocab()) bad_id(shard, settled_ + i, ids[i]);
                        bytes += table_.length(ids[i]);
                      }
                    });
    settled_ += take;
  }
  record_bytes_ += bytes;
  counts_.bytes += bytes;
}

StreamCounts StreamCursor::take_counts() {
  settle();
  return std::exchange(counts_, {});
}

/// Stored tokens of the record from `token_` on, as many as lie in the window; at least one.
std::span<const std::byte> StreamCursor::upcoming() {
  const Shard& shard = *shards_[shard_];
  const unsigned width = shard.token_width();
  const std::uint64_t at = range_.start + token_;
  if (at < window_begin_ || at >= window_begin_ + window_.size() / width) {
    // Pieces run on into the records that follow: short documents would cost a read each.
    window_begin_ = shard.mapped() ? 0 : at;
    const std::uint64_t left = shard.stored_tokens() - window_begin_;
    window_ = shard.token_bytes(window_begin_, shard.mapped() ? left : std::min(left, kPiece), window_scratch_);
  }
  const auto rest = window_.subspan(static_cast<std::size_t>((at - window_begin_) * width));
  return rest.first(std::min<std::size_t>(rest.size(), static_cast<std::size_t>((range_.length - token_) * width)));
}

template <class Token>
std::uint64_t StreamCursor::pull_tokens(Token* tokens, Token* targets, std::uint64_t count) {
  const Shard& shard = *shards_[shard_];
  const auto stored = upcoming();
  const std::uint64_t take = std::min<std::uint64_t>(count, stored.size() / shard.token_width());
  with_token_type(shard.token_width(), stored, [&](const auto* ids) {
    if (widen(ids, tokens, targets, static_cast<std::size_t>(take)) < table_.n_vocab()) return;
    // In what is stored: what was written may have lost bits.
    const auto* const at = std::find_if(ids, ids + take, [&](std::uint64_t id) { return id >= table_.n_vocab(); });
    bad_id(shard, token_ + static_cast<std::uint64_t>(at - ids), *at);
  });
  token_ += take;
  counts_.scored += take;
  return take;
}

/// Emits up to `count` bytes of the current record; without places to write to it only passes over them.
template <class Token>
std::uint64_t StreamCursor::pull_bytes(Token* tokens, Token* targets, std::uint64_t count) {
  const Shard& shard = *shards_[shard_];
  const auto stored = upcoming();
  std::uint64_t done = 0;
  with_token_type(shard.token_width(), stored, [&](const auto* ids) {
    const auto* end = ids + stored.size() / shard.token_width();
    for (; ids != end && done < count; ++ids) {
      if (*ids >= table_.n_vocab()) bad_id(shard, token_, *ids);
      const auto bytes = table_.bytes(*ids).subspan(within_);
      const std::uint64_t take = std::min<std::uint64_t>(bytes.size(), count - done);
      if (tokens != nullptr) {
        for (std::uint64_t k = 0; k < take; ++k) {
          tokens[done + k] = targets[done + k] = std::to_integer<Token>(bytes[k]);
        }
      }
      done += take;
      if (take < bytes.size()) {
        within_ += take;
        return;
      }
      within_ = 0;
      ++token_;
    }
  });
  counts_.scored += done;
  counts_.bytes += done;
  record_bytes_ += done;
  return done;
}

template <class Token>
std::uint64_t StreamCursor::pull(Token* tokens, Token* targets, std::uint64_t count) {
  std::uint64_t done = 0;
  while (done < count) {
    if (!inside_) {
      if (!enter_document()) break;
      tokens[done] = targets[done] = static_cast<Token>(end_of_text_);
      ++done;
      ++counts_.special;
    } else {
      done += basis_ == Basis::tokens ? pull_tokens(tokens + done, targets + done, count - done)
                                      : pull_bytes(tokens + done, targets + done, count - done);
    }
    if (token_ == range_.length) leave_document();
  }
  return done;
}

template std::uint64_t StreamCursor::pull(std::int64_t*, std::int64_t*, std::uint64_t);
template std::uint64_t StreamCursor::pull(std::int32_t*, std::int32_t*, std::uint64_t);

std::uint64_t StreamCursor::skip(std::uint64_t count) {
  std::uint64_t done = 0;
  while (done < count) {
    if (!inside_) {
      while (shard_ < shards_.size() && record_ == 0) {
        const Shard& shard = *shards_[shard_];
        const std::uint64_t text = text_elements(shard, basis_);
        if (shard.records() + text > count - done) break;
        done += shard.records() + text;
        counts_.scored += text;
        counts_.special += shard.records();
        counts_.bytes += shard.utf8_bytes_total();
        ++shard_;
        window_ = {};
      }
      if (done == count || !enter_document()) break;
      const Shard& shard = *shards_[shard_];
      const std::uint64_t text = basis_ == Basis::tokens ? range_.length : shard.utf8_bytes(record_);
      ++done;
      ++counts_.special;
      if (text <= count - done) {
        done += text;
        counts_.scored += text;
        counts_.bytes += shard.utf8_bytes(record_);
        inside_ = false;
        ++record_;
        continue;
      }
    } else if (basis_ == Basis::tokens) {
      const std::uint64_t take = std::min(count - done, range_.length - token_);
      token_ += take;
      counts_.scored += take;
      done += take;
    } else {
      done += pull_bytes<std::int64_t>(nullptr, nullptr, count - done);
    }
    if (token_ == range_.length) leave_document();
  }
  return done;
}

// ------------------------------------------------------------------------------------------------ stream

TokenStream::TokenStream(Shards shards, std::shared_ptr<const TokenTable> table, Config config, IdBuffers buffers)
    : shards_(std::move(shards)),
      table_(std::move(table)),
      config_(config),
      buffers_(buffers),
      cursor_(shards_, *table_, config_.basis, config_.end_of_text),
      position_(kUnknown) {
  const auto require = [](bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
  };
  // The upper ends keep every product of these below 2^63.
  require(config_.seq_len >= 2 && config_.seq_len <= (1u << 30),
          "seq_len " + std::to_string(config_.seq_len) + ": expected 2 to 2^30: a row predicts seq_len - 1 tokens");
  require(config_.batch_size >= 1 && config_.batch_size <= (1u << 20),
          "batch_size " + std::to_string(config_.batch_size) + ": expected 1 to 2^20");
  require(config_.prefetch >= 1 && config_.prefetch <= (1u << 10),
          "prefetch " + std::to_string(config_.prefetch) + ": expected 1 to 1024");
  require(config_.rank < config_.world,
          "rank " + std::to_string(config_.rank) + ": expected a rank below world " + std::to_string(config_.world));
  const std::uint64_t size = slots(config_.prefetch) * config_.batch_size * config_.seq_len;
  std::visit(
      [&](const auto& ids) {
        require(ids.tokens.size() == size && ids.targets.size() == size,
                "stream buffers: expected " + std::to_string(size) + " elements each");
      },
      buffers_);
  require(table_->n_vocab() <= static_cast<std::uint64_t>(std::numeric_limits<std::int32_t>::max()),
          "a vocabulary of " + std::to_string(table_->n_vocab()) + " ids does not fit 32-bit tokens");
  for (const auto& shard : shards_) {
    require(shard->knows_utf8_bytes(), shard->path() + ": its UTF-8 lengths are unknown: open it with a tokenizer");
  }
  plan_ = make_plan();
  batches_ = plan_.batches / config_.world;
  require(config_.start_batch <= batches_, "start_batch " + std::to_string(config_.start_batch) + ": the stream has " +
                                               std::to_string(batches_) + " batches");
  ring_.resize(slots(config_.prefetch));
  ReadAhead::Config ahead;
  ahead.steps = batches_;
  ahead.start = config_.start_batch;
  ahead.prefetch = config_.prefetch;
  ahead.in_order = true;
  ahead.forked =
      "this TokenStream was opened in another process, and its reader thread did not survive the fork: open it again "
      "in this process";
  ahead_ = std::make_unique<ReadAhead>(std::move(ahead),
                                       [this](std::uint64_t local, std::size_t slot) { read(local, slot); });
}

void TokenStream::Deleter::operator()(TokenStream* stream) const {
  if (!stream->ahead_->forked()) delete stream;
}

TokenStream::~TokenStream() = default;

StreamPlan TokenStream::make_plan() const {
  StreamPlan plan;
  std::uint64_t text = 0;
  std::uint64_t bytes = 0;
  for (const auto& shard : shards_) {
    plan.documents += shard->records();
    text += text_elements(*shard, config_.basis);
    bytes += shard->utf8_bytes_total();
  }
  const std::uint64_t elements = plan.documents + text;
  const std::uint64_t targets_a_row = config_.seq_len - 1;
  plan.rows = elements == 0 ? 0 : (elements - 1) / targets_a_row;
  if (config_.world == 1) {
    plan.batches = (plan.rows + config_.batch_size - 1) / config_.batch_size;
  } else {  // every rank takes as many steps, all of full batches
    plan.batches = plan.rows / (config_.batch_size * config_.world) * config_.world;
    plan.rows = plan.batches * config_.batch_size;
  }
  if (plan.rows != 0) {
    StreamCursor cursor(shards_, *table_, config_.basis, config_.end_of_text);
    cursor.skip(plan.rows * targets_a_row + 1);
    const StreamCounts covered = cursor.take_counts();
    plan.covered_documents = covered.special;
    plan.special_tokens = covered.special - 1;  // the first end-of-text is context only
    plan.covered_bytes = covered.bytes;
    plan.covered_tokens = covered.scored;
  }
  plan.tail_bytes = bytes - plan.covered_bytes;
  plan.tail_tokens = text - plan.covered_tokens;
  return plan;
}

template <class Token>
void TokenStream::fill(StreamBatch& batch, const TokenBuffers<Token>& buffers) {
  const std::uint64_t width = config_.seq_len;
  const std::uint64_t first_row = batch.index * config_.batch_size;
  batch.rows = std::min(config_.batch_size, plan_.rows - first_row);
  batch.width = width;
  Token* tokens = buffers.tokens.data() + batch.slot * config_.batch_size * width;
  Token* targets = buffers.targets.data() + batch.slot * config_.batch_size * width;
  for (std::uint64_t row = 0; row < batch.rows; ++row, tokens += width, targets += width) {
    tokens[0] = static_cast<Token>(carry_);
    if (cursor_.pull(tokens + 1, targets, width - 1) != width - 1) {
      throw DataFault(shards_.back()->path() + ": the records end before the totals of the shard headers do");
    }
    carry_ = tokens[width - 1];
    targets[width - 1] = static_cast<Token>(kIgnore);
  }
  batch.counts = cursor_.take_counts();
  batch.documents = batch.counts.special + (batch.index == 0 ? 1 : 0);
}

/// Reads this rank's batch `local`, passing over those of other ranks.
void TokenStream::read(std::uint64_t local, std::size_t slot) {
  StreamBatch batch;
  batch.index = local * config_.world + config_.rank;
  batch.slot = slot;
  if (position_ != batch.index) {
    const std::uint64_t targets_a_batch = config_.batch_size * (config_.seq_len - 1);
    const std::uint64_t gap = batch.index - (position_ == kUnknown ? 0 : position_);
    cursor_.skip(gap * targets_a_batch - (position_ == kUnknown ? 0 : 1));
    std::int64_t unused = 0;
    if (cursor_.pull(&carry_, &unused, 1) != 1) {
      throw DataFault(shards_.back()->path() + ": the records end before the totals of the shard headers do");
    }
    cursor_.take_counts();  // another rank's
  }
  position_ = batch.index + 1;
  std::visit([&](const auto& ids) { fill(batch, ids); }, buffers_);
  ring_[slot] = batch;
}

TokenStream::Wait TokenStream::next(StreamBatch& batch, unsigned milliseconds) {
  std::size_t slot = 0;
  const Wait wait = ahead_->next(slot, milliseconds);
  if (wait == Wait::ready) batch = ring_[slot];
  return wait;
}

}  // namespace prism
