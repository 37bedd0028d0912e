#include "shard.hpp"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <utility>

namespace prism {
namespace {

constexpr char kMagic[8] = {'P', 'R', 'S', 'M', 'S', 'H', 'R', 'D'};
constexpr char kFooterMagic[8] = {'P', 'R', 'S', 'M', 'F', 'O', 'O', 'T'};
constexpr std::uint32_t kVersion = 1;
constexpr std::uint64_t kAlign = 64;  // one cache line: any vector load of a section's start is aligned
constexpr std::uint64_t kMaxCount = std::uint64_t{1} << 56;  // keeps every product and sum below 2^63
constexpr std::size_t kWriteBuffer = std::size_t{1} << 20;
constexpr std::uint64_t kVerifyTokens = std::uint64_t{1} << 20;  // tokens looked at in one piece

struct Header {
  char magic[8];
  std::uint32_t version;
  std::uint32_t token_width;
  std::uint64_t records;
  std::uint64_t tokens;
  std::uint64_t utf8_bytes;
  std::uint64_t file_bytes;
  std::uint64_t tokens_at;
  std::uint64_t offsets_at;
  std::uint64_t utf8_bytes_at;
  std::uint64_t doc_ids_at;
  std::uint64_t footer_at;
  std::uint32_t n_vocab;
  std::uint32_t end_of_text;
  std::uint8_t fingerprint[32];
  char tokenizer[64];
  std::uint8_t reserved[56];
  std::uint64_t checksum;  // XXH64 of the 248 bytes before it
};
static_assert(sizeof(Header) == 256 && offsetof(Header, checksum) == 248);

struct Footer {
  char magic[8];
  std::uint64_t tokens;  // XXH64 of each section, padding excluded
  std::uint64_t offsets;
  std::uint64_t utf8_bytes;
  std::uint64_t doc_ids;
  std::uint64_t header;  // the header's checksum again: a footer belongs to one header
  std::uint64_t reserved;
  std::uint64_t checksum;  // XXH64 of the 56 bytes before it
};
static_assert(sizeof(Footer) == 64 && offsetof(Footer, checksum) == 56);

constexpr std::uint64_t aligned(std::uint64_t offset) { return (offset + kAlign - 1) / kAlign * kAlign; }

/// The layout follows from the counts alone; a header that says otherwise contradicts itself.
struct Layout {
  std::uint64_t tokens_at, offsets_at, utf8_bytes_at, doc_ids_at, footer_at, file_bytes;

  Layout(std::uint64_t records, std::uint64_t tokens, unsigned width)
      : tokens_at(sizeof(Header)),
        offsets_at(aligned(tokens_at + tokens * width)),
        utf8_bytes_at(aligned(offsets_at + (records + 1) * 8)),
        doc_ids_at(aligned(utf8_bytes_at + records * 4)),
        footer_at(aligned(doc_ids_at + records * 8)),
        file_bytes(footer_at + sizeof(Footer)) {}
};

template <typename T>
std::span<const std::byte> as_bytes(const T& value) {
  return std::as_bytes(std::span<const T, 1>(&value, 1));
}

template <typename T>
std::uint64_t checksum_of(const T& head) {
  return xxh64(as_bytes(head).first(offsetof(T, checksum)));
}

std::string hex(std::uint64_t value) {
  char text[19];
  std::snprintf(text, sizeof text, "0x%016llx", static_cast<unsigned long long>(value));
  return text;
}

std::string printable(const char* text, std::size_t size) {
  std::string out;
  for (std::size_t i = 0; i < size; ++i) {
    const unsigned char c = static_cast<unsigned char>(text[i]);
    if (c >= 0x20 && c < 0x7F) {
      out += static_cast<char>(c);
    } else {
      char escaped[5];
      std::snprintf(escaped, sizeof escaped, "\\x%02x", c);
      out += escaped;
    }
  }
  return "'" + out + "'";
}

[[noreturn]] void fault_at(const std::string& path, std::uint64_t offset, const std::string& expected,
                           const std::string& found) {
  throw DataFault(path + ": offset " + std::to_string(offset) + ": expected " + expected + ", found " + found);
}

std::uint64_t checksum_region(const MappedFile& file, std::uint64_t offset, std::uint64_t size, const char* what) {
  Xxh64 hash;
  std::vector<std::byte> scratch;
  for (std::uint64_t done = 0; done < size;) {
    const std::uint64_t take = std::min<std::uint64_t>(size - done, kWriteBuffer);
    hash.update(file.bytes(offset + done, take, scratch, what));
    done += take;
  }
  return hash.digest();
}

void check_lengths(std::uint64_t tokens, std::span<const std::uint64_t> lengths) {
  std::uint64_t left = tokens;
  for (const std::uint64_t length : lengths) {
    if (length > left) {
      throw std::invalid_argument("record lengths sum to more than the " + std::to_string(tokens) + " tokens given");
    }
    left -= length;
  }
  if (left != 0) {
    throw std::invalid_argument("record lengths sum to " + std::to_string(tokens - left) + ", but there are " +
                                std::to_string(tokens) + " tokens");
  }
}

}  // namespace

TokenTable::TokenTable(std::vector<std::uint64_t> offsets, std::vector<std::byte> bytes)
    : offsets_(std::move(offsets)), bytes_(std::move(bytes)) {
  if (offsets_.empty() || offsets_.front() != 0 || offsets_.back() != bytes_.size() ||
      !std::is_sorted(offsets_.begin(), offsets_.end())) {
    throw std::invalid_argument("token table: offsets must rise from 0 to the number of bytes (" +
                                std::to_string(bytes_.size()) + ")");
  }
  lengths_.reserve(offsets_.size() - 1);
  for (std::size_t id = 0; id + 1 < offsets_.size(); ++id) {
    const std::uint64_t length = offsets_[id + 1] - offsets_[id];
    if (length > std::numeric_limits<std::uint16_t>::max()) {
      throw std::invalid_argument("token table: id " + std::to_string(id) + " stands for " + std::to_string(length) +
                                  " bytes: expected at most 65535");
    }
    lengths_.push_back(static_cast<std::uint16_t>(length));
  }
}

void TokenTable::count(std::span<const std::uint32_t> tokens, std::span<const std::uint64_t> lengths,
                       std::span<std::uint64_t> bytes) const {
  check_lengths(tokens.size(), lengths);
  std::size_t at = 0;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    std::uint64_t total = 0;
    for (const std::size_t end = at + lengths[i]; at < end; ++at) {
      if (tokens[at] >= n_vocab()) {
        throw DataFault("record " + std::to_string(i) + ": expected a token id below " + std::to_string(n_vocab()) +
                        ", found " + std::to_string(tokens[at]));
      }
      total += length(tokens[at]);
    }
    bytes[i] = total;
  }
}

std::string TokenTable::decode(std::span<const std::uint32_t> tokens) const {
  std::string out;
  for (const std::uint32_t id : tokens) {
    if (id >= n_vocab()) {
      throw DataFault("expected a token id below " + std::to_string(n_vocab()) + ", found " + std::to_string(id));
    }
    const auto text = bytes(id);
    out.append(reinterpret_cast<const char*>(text.data()), text.size());
  }
  return out;
}

void Shard::fault(std::uint64_t offset, const std::string& expected, const std::string& found) const {
  fault_at(path(), offset, expected, found);
}

std::shared_ptr<Shard> Shard::open(const std::string& path, Access access) {
  std::shared_ptr<Shard> shard(new Shard());
  shard->file_ = std::make_shared<const MappedFile>(path, access);
  const MappedFile& file = *shard->file_;
  const auto n = [](std::uint64_t value) { return std::to_string(value); };

  const std::uint64_t smallest = Layout(0, 0, 2).file_bytes;
  if (file.size() < smallest) {
    fault_at(path, file.size(), "a prism_shard.v1 file of at least " + n(smallest) + " bytes",
             "a file of " + n(file.size()) + " bytes");
  }
  Header head;
  file.read(0, std::as_writable_bytes(std::span(&head, 1)), "header");
  if (std::memcmp(head.magic, kMagic, sizeof kMagic) != 0) {
    fault_at(path, 0, "the magic 'PRSMSHRD' of a prism_shard.v1 file", printable(head.magic, sizeof head.magic));
  }
  if (head.version != kVersion) fault_at(path, offsetof(Header, version), "version 1", "version " + n(head.version));
  if (const std::uint64_t sum = checksum_of(head); sum != head.checksum) {
    fault_at(path, offsetof(Header, checksum), "header checksum " + hex(sum), hex(head.checksum));
  }
  // The checksum finds damage; what follows finds a writer (or a forger) that contradicts itself.
  if (head.token_width != 2 && head.token_width != 4) {
    fault_at(path, offsetof(Header, token_width), "a token width of 2 or 4 bytes", n(head.token_width));
  }
  if (head.records >= kMaxCount) fault_at(path, offsetof(Header, records), "fewer than 2^56 records", n(head.records));
  if (head.tokens >= kMaxCount) fault_at(path, offsetof(Header, tokens), "fewer than 2^56 tokens", n(head.tokens));
  if (head.utf8_bytes >= kMaxCount) {
    fault_at(path, offsetof(Header, utf8_bytes), "fewer than 2^56 UTF-8 bytes", n(head.utf8_bytes));
  }
  const Layout layout(head.records, head.tokens, head.token_width);
  const std::pair<std::uint64_t, std::uint64_t> places[] = {
      {head.tokens_at, layout.tokens_at},         {head.offsets_at, layout.offsets_at},
      {head.utf8_bytes_at, layout.utf8_bytes_at}, {head.doc_ids_at, layout.doc_ids_at},
      {head.footer_at, layout.footer_at},
  };
  for (std::size_t i = 0; i < std::size(places); ++i) {
    if (places[i].first != places[i].second) {
      fault_at(path, offsetof(Header, tokens_at) + 8 * i, "a section at " + n(places[i].second), n(places[i].first));
    }
  }
  if (head.file_bytes != layout.file_bytes) {
    fault_at(path, offsetof(Header, file_bytes), "a file size of " + n(layout.file_bytes), n(head.file_bytes));
  }
  if (file.size() != layout.file_bytes) {
    fault_at(
        path, std::min(file.size(), layout.file_bytes),
        "a file of " + n(layout.file_bytes) + " bytes (" + n(head.records) + " records, " + n(head.tokens) + " tokens)",
        "a file of " + n(file.size()) + " bytes");
  }
  Footer foot;
  file.read(head.footer_at, std::as_writable_bytes(std::span(&foot, 1)), "footer");
  if (std::memcmp(foot.magic, kFooterMagic, sizeof kFooterMagic) != 0) {
    fault_at(path, head.footer_at, "the footer magic 'PRSMFOOT'", printable(foot.magic, sizeof foot.magic));
  }
  if (const std::uint64_t sum = checksum_of(foot); sum != foot.checksum) {
    fault_at(path, head.footer_at + offsetof(Footer, checksum), "footer checksum " + hex(sum), hex(foot.checksum));
  }
  if (foot.header != head.checksum) {
    fault_at(path, head.footer_at + offsetof(Footer, header), "the header checksum " + hex(head.checksum),
             hex(foot.header));
  }

  shard->format_ = "prism_shard.v1";
  shard->width_ = head.token_width;
  shard->records_ = head.records;
  shard->tokens_ = shard->stored_ = head.tokens;
  shard->data_offset_ = head.tokens_at;
  shard->total_bytes_ = head.utf8_bytes;
  shard->knows_bytes_ = true;
  shard->stamp_.name.assign(head.tokenizer, ::strnlen(head.tokenizer, sizeof head.tokenizer));
  std::copy(std::begin(head.fingerprint), std::end(head.fingerprint), shard->stamp_.fingerprint.begin());
  shard->stamp_.n_vocab = head.n_vocab;
  shard->stamp_.end_of_text = head.end_of_text;

  std::vector<std::byte> unused;
  if (file.mapped()) {
    const auto offsets = file.bytes(head.offsets_at, (head.records + 1) * 8, unused, "offsets");
    const auto counts = file.bytes(head.utf8_bytes_at, head.records * 4, unused, "UTF-8 lengths");
    shard->offsets_ = {reinterpret_cast<const std::uint64_t*>(offsets.data()), head.records + 1};
    shard->utf8_bytes_ = {reinterpret_cast<const std::uint32_t*>(counts.data()), head.records};
  } else {
    shard->own_offsets_.resize(head.records + 1);
    shard->own_utf8_bytes_.resize(head.records);
    file.read(head.offsets_at, std::as_writable_bytes(std::span(shard->own_offsets_)), "offsets");
    file.read(head.utf8_bytes_at, std::as_writable_bytes(std::span(shard->own_utf8_bytes_)), "UTF-8 lengths");
    shard->offsets_ = shard->own_offsets_;
    shard->utf8_bytes_ = shard->own_utf8_bytes_;
  }
  if (shard->offsets_.front() != 0) fault_at(path, head.offsets_at, "first offset 0", n(shard->offsets_.front()));
  if (shard->offsets_.back() != head.tokens) {
    fault_at(path, head.offsets_at + head.records * 8, "last offset " + n(head.tokens), n(shard->offsets_.back()));
  }
  return shard;
}

RecordRange Shard::range(std::uint64_t i) const {
  if (i >= records_) {
    throw std::out_of_range(path() + ": record " + std::to_string(i) + " of " + std::to_string(records_));
  }
  const std::uint64_t begin = offsets_[i];
  const std::uint64_t end = offsets_[i + 1];
  if (begin > end || end > tokens_) {
    const Layout layout(records_, tokens_, width_);
    fault(layout.offsets_at + (i + 1) * 8,
          "record " + std::to_string(i) + " to end between token " + std::to_string(begin) + " and " +
              std::to_string(tokens_),
          std::to_string(end));
  }
  return {starts_.empty() ? begin : starts_[i], end - begin};
}

void Shard::prefetch_range(std::uint64_t i) const {
  if (i >= records_) return;
  __builtin_prefetch(offsets_.data() + i);
  if (!starts_.empty()) __builtin_prefetch(starts_.data() + i);
  if (!utf8_bytes_.empty()) __builtin_prefetch(utf8_bytes_.data() + i);
}

void Shard::prefetch_tokens(std::uint64_t i, std::uint64_t from) const {
  constexpr std::uint64_t kLine = 64;
  constexpr std::uint64_t kFirst = 2048;  // the processor sees by itself how it goes on, page by page
  constexpr std::uint64_t kPage = 4096;
  if (!mapped() || i >= records_ || offsets_[i] > offsets_[i + 1] || offsets_[i + 1] > tokens_) return;
  const std::uint64_t length = offsets_[i + 1] - offsets_[i];
  if (from >= length) return;
  const std::uint64_t begin = data_offset_ + ((starts_.empty() ? offsets_[i] : starts_[i]) + from) * width_;
  const std::uint64_t end = std::min(begin + (length - from) * width_, file_->size());
  const std::byte* const data = file_->mapping();
  for (std::uint64_t at = begin; at < std::min(end, begin + kFirst); at += kLine) __builtin_prefetch(data + at);
  for (std::uint64_t at = (begin / kPage + 1) * kPage; at < end; at += kPage) __builtin_prefetch(data + at);
}

std::vector<std::uint64_t> Shard::doc_ids() const {
  if (format_ != "prism_shard.v1") return {};
  std::vector<std::uint64_t> ids(records_);
  file_->read(Layout(records_, tokens_, width_).doc_ids_at, std::as_writable_bytes(std::span(ids)), "document ids");
  return ids;
}

std::vector<std::byte> Shard::seal() const {
  if (format_ != "prism_shard.v1") {
    std::vector<std::byte> scratch;
    const std::uint64_t head = std::min<std::uint64_t>(stored_, (std::uint64_t{1} << 20) / width_);
    const std::uint64_t fields[] = {width_,
                                    data_offset_,
                                    stored_,
                                    records_,
                                    total_bytes_,
                                    xxh64(std::as_bytes(offsets_)),
                                    xxh64(std::as_bytes(std::span(starts_))),
                                    xxh64(std::as_bytes(utf8_bytes_)),
                                    xxh64(token_bytes(0, head, scratch))};
    const auto raw = std::as_bytes(std::span(fields));
    return {raw.begin(), raw.end()};
  }
  std::vector<std::byte> out(sizeof(Header) + sizeof(Footer));
  const std::span<std::byte> whole(out);
  file_->read(0, whole.first(sizeof(Header)), "header");
  file_->read(file_->size() - sizeof(Footer), whole.subspan(sizeof(Header)), "footer");
  return out;
}

std::uint64_t Shard::count_record(std::uint64_t i, const TokenTable& table, std::vector<std::byte>& scratch) const {
  const RecordRange record = range(i);
  std::uint64_t total = 0;
  for (std::uint64_t done = 0; done < record.length;) {
    const std::uint64_t take = std::min(record.length - done, kVerifyTokens);
    with_token_type(width_, token_bytes(record.start + done, take, scratch), [&](const auto* ids) {
      for (std::uint64_t k = 0; k < take; ++k) {
        if (ids[k] >= table.n_vocab()) {
          fault(data_offset_ + (record.start + done + k) * width_,
                "a token id below " + std::to_string(table.n_vocab()) + " in record " + std::to_string(i),
                std::to_string(ids[k]));
        }
        total += table.length(ids[k]);
      }
    });
    done += take;
  }
  return total;
}

void Shard::count_utf8_bytes(const TokenTable& table) {
  std::vector<std::uint32_t> counts(records_);
  std::vector<std::byte> scratch;
  std::uint64_t total = 0;
  for (std::uint64_t i = 0; i < records_; ++i) {
    const std::uint64_t bytes = count_record(i, table, scratch);
    if (bytes > std::numeric_limits<std::uint32_t>::max()) {
      throw DataFault(path() + ": record " + std::to_string(i) +
                      ": expected fewer than 4294967296 UTF-8 bytes, found " + std::to_string(bytes));
    }
    counts[i] = static_cast<std::uint32_t>(bytes);
    total += bytes;
  }
  own_utf8_bytes_ = std::move(counts);
  utf8_bytes_ = own_utf8_bytes_;
  total_bytes_ = total;
  knows_bytes_ = true;
}

void Shard::verify(const TokenTable* table) const {
  const bool native = format_ == "prism_shard.v1";
  const Layout layout(records_, tokens_, width_);
  if (native) {
    Footer foot;
    file_->read(layout.footer_at, std::as_writable_bytes(std::span(&foot, 1)), "footer");
    const struct {
      const char* name;
      std::uint64_t at, size, padded_to, checksum;
    } sections[] = {
        {"tokens", layout.tokens_at, tokens_ * width_, layout.offsets_at, foot.tokens},
        {"offsets", layout.offsets_at, (records_ + 1) * 8, layout.utf8_bytes_at, foot.offsets},
        {"UTF-8 lengths", layout.utf8_bytes_at, records_ * 4, layout.doc_ids_at, foot.utf8_bytes},
        {"document ids", layout.doc_ids_at, records_ * 8, layout.footer_at, foot.doc_ids},
    };
    std::vector<std::byte> scratch;
    for (const auto& section : sections) {
      const std::uint64_t sum = checksum_region(*file_, section.at, section.size, section.name);
      if (sum != section.checksum) {
        fault(section.at, std::string("checksum ") + hex(section.checksum) + " over the " + section.name, hex(sum));
      }
      const std::uint64_t end = section.at + section.size;
      const auto padding = file_->bytes(end, section.padded_to - end, scratch, "padding");
      for (std::size_t i = 0; i < padding.size(); ++i) {
        if (padding[i] != std::byte{0}) {
          fault(end + i, std::string("zero padding after the ") + section.name,
                std::to_string(std::to_integer<int>(padding[i])));
        }
      }
    }
  }
  std::vector<std::byte> scratch;
  std::uint64_t total = 0;
  for (std::uint64_t i = 0; i < records_; ++i) {
    range(i);
    if (!knows_bytes_) continue;
    total += utf8_bytes_[i];
    if (table == nullptr) continue;
    if (const std::uint64_t bytes = count_record(i, *table, scratch); bytes != utf8_bytes_[i]) {
      fault(native ? layout.utf8_bytes_at + i * 4 : data_offset_,
            "record " + std::to_string(i) + " to have the " + std::to_string(bytes) + " UTF-8 bytes of its tokens",
            std::to_string(utf8_bytes_[i]));
    }
  }
  if (knows_bytes_ && total != total_bytes_) {
    fault(offsetof(Header, utf8_bytes), std::to_string(total) + " UTF-8 bytes, the sum over the records",
          std::to_string(total_bytes_));
  }
  const std::uint64_t limit = table != nullptr ? table->n_vocab() : stamp_.n_vocab;
  for (std::uint64_t done = 0; limit != 0 && done < stored_;) {
    const std::uint64_t take = std::min(stored_ - done, kVerifyTokens);
    with_token_type(width_, token_bytes(done, take, scratch), [&](const auto* ids) {
      const auto* bad = std::find_if(ids, ids + take, [&](auto id) { return id >= limit; });
      if (bad != ids + take) {
        fault(data_offset_ + (done + static_cast<std::uint64_t>(bad - ids)) * width_,
              "a token id below " + std::to_string(limit), std::to_string(*bad));
      }
    });
    done += take;
  }
}

// ------------------------------------------------------------------------------------------------ writer

ShardWriter::ShardWriter(std::string path, TokenizerStamp tokenizer)
    : path_(std::move(path)), stamp_(std::move(tokenizer)), width_(stamp_.n_vocab > 0x10000u ? 4 : 2) {
  if (stamp_.n_vocab == 0) throw std::invalid_argument("a shard needs the vocabulary size of its tokenizer");
  if (stamp_.name.empty() || stamp_.name.size() > sizeof(Header::tokenizer)) {
    throw std::invalid_argument("tokenizer name '" + stamp_.name + "': expected 1 to 64 bytes of UTF-8");
  }
  std::uint64_t suffix = 0;
  for (int tries = 0; fd_ < 0; ++tries) {
    if (::getrandom(&suffix, sizeof suffix, 0) != sizeof suffix) throw FileError(errno, path_);
    temporary_ = path_ + "." + hex(suffix).substr(2) + ".tmp";
    fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd_ < 0 && (errno != EEXIST || tries == 8)) throw FileError(errno, temporary_);
  }
  buffer_.reserve(kWriteBuffer);
  const std::vector<std::byte> room(sizeof(Header));  // the counts are known only at the end
  write(room);
}

ShardWriter::~ShardWriter() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
}

void ShardWriter::write(std::span<const std::byte> data) {
  written_ += data.size();
  while (!data.empty()) {
    const std::size_t take = std::min(data.size(), kWriteBuffer - buffer_.size());
    buffer_.insert(buffer_.end(), data.begin(), data.begin() + static_cast<std::ptrdiff_t>(take));
    data = data.subspan(take);
    if (buffer_.size() == kWriteBuffer) flush();
  }
}

void ShardWriter::flush() {
  for (std::size_t done = 0; done < buffer_.size();) {
    const ssize_t put = ::write(fd_, buffer_.data() + done, buffer_.size() - done);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) throw FileError(errno, temporary_);
    done += static_cast<std::size_t>(put);
  }
  buffer_.clear();
}

void ShardWriter::pad() {
  const std::vector<std::byte> zeros(aligned(written_) - written_);
  write(zeros);
}

std::uint64_t ShardWriter::section(std::span<const std::byte> data) {
  write(data);
  pad();
  return xxh64(data);
}

void ShardWriter::add(std::span<const std::uint32_t> tokens, std::span<const std::uint64_t> lengths,
                      std::span<const std::uint64_t> utf8_bytes, std::span<const std::uint64_t> doc_ids) {
  if (fd_ < 0) throw std::logic_error(path_ + ": the shard is finished");
  if (lengths.size() != utf8_bytes.size() || lengths.size() != doc_ids.size()) {
    throw std::invalid_argument(
        "lengths, utf8_bytes and doc_ids must have one entry a record: " + std::to_string(lengths.size()) + ", " +
        std::to_string(utf8_bytes.size()) + ", " + std::to_string(doc_ids.size()));
  }
  // Everything is checked before anything is taken, so a refused call leaves the shard as it was.
  check_lengths(tokens.size(), lengths);
  for (const std::uint32_t id : tokens) {
    if (id >= stamp_.n_vocab) {
      throw DataFault(path_ + ": token id " + std::to_string(id) + ": expected an id below the vocabulary size " +
                      std::to_string(stamp_.n_vocab) + " of '" + stamp_.name + "'");
    }
  }
  for (const std::uint64_t bytes : utf8_bytes) {
    if (bytes > std::numeric_limits<std::uint32_t>::max()) {
      throw DataFault(path_ + ": a document of " + std::to_string(bytes) +
                      " UTF-8 bytes: expected fewer than 4294967296; split it");
    }
  }

  std::span<const std::byte> stored = std::as_bytes(tokens);
  if (width_ == 2) {
    narrow_.resize(tokens.size() * 2);
    auto* out = reinterpret_cast<std::uint16_t*>(narrow_.data());
    std::transform(tokens.begin(), tokens.end(), out, [](std::uint32_t id) { return static_cast<std::uint16_t>(id); });
    stored = std::span<const std::byte>(narrow_);
  }
  tokens_hash_.update(stored);
  write(stored);
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    offsets_.push_back(offsets_.back() + lengths[i]);
    utf8_bytes_.push_back(static_cast<std::uint32_t>(utf8_bytes[i]));
    doc_ids_.push_back(doc_ids[i]);
    total_bytes_ += utf8_bytes[i];
  }
}

void ShardWriter::finish() {
  if (fd_ < 0) throw std::logic_error(path_ + ": the shard is finished");
  const Layout layout(records(), tokens(), width_);
  Footer foot{};
  std::memcpy(foot.magic, kFooterMagic, sizeof kFooterMagic);
  pad();
  foot.tokens = tokens_hash_.digest();
  foot.offsets = section(std::as_bytes(std::span(offsets_)));
  foot.utf8_bytes = section(std::as_bytes(std::span(utf8_bytes_)));
  foot.doc_ids = section(std::as_bytes(std::span(doc_ids_)));

  Header head{};
  std::memcpy(head.magic, kMagic, sizeof kMagic);
  head.version = kVersion;
  head.token_width = width_;
  head.records = records();
  head.tokens = tokens();
  head.utf8_bytes = total_bytes_;
  head.file_bytes = layout.file_bytes;
  head.tokens_at = layout.tokens_at;
  head.offsets_at = layout.offsets_at;
  head.utf8_bytes_at = layout.utf8_bytes_at;
  head.doc_ids_at = layout.doc_ids_at;
  head.footer_at = layout.footer_at;
  head.n_vocab = stamp_.n_vocab;
  head.end_of_text = stamp_.end_of_text;
  std::copy(stamp_.fingerprint.begin(), stamp_.fingerprint.end(), head.fingerprint);
  std::memcpy(head.tokenizer, stamp_.name.data(), stamp_.name.size());
  head.checksum = checksum_of(head);
  foot.header = head.checksum;
  foot.checksum = checksum_of(foot);
  write(as_bytes(foot));
  flush();
  if (::pwrite(fd_, &head, sizeof head, 0) != static_cast<ssize_t>(sizeof head)) throw FileError(errno, temporary_);
  if (::fsync(fd_) != 0) throw FileError(errno, temporary_);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) throw FileError(errno, path_);
  ::close(fd_);
  fd_ = -1;
  // The name is durable only once its directory is; a filesystem that cannot sync directories has nothing to lose.
  const std::size_t slash = path_.find_last_of('/');
  const std::string folder = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
  if (const int dir = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); dir >= 0) {
    ::fsync(dir);
    ::close(dir);
  }
}

}  // namespace prism
