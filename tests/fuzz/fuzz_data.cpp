// Every parser of csrc under mutated files: whatever the bytes, the outcome is records or one of our exceptions.
//
// Built by tests/fuzz/CMakeLists.txt with AddressSanitizer and UndefinedBehaviorSanitizer. With clang it is a libFuzzer
// target; with any other compiler `main` below mutates valid files of each format itself.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "batch_assembler.hpp"
#include "foreign.hpp"
#include "token_stream.hpp"

namespace {

using Bytes = std::vector<std::uint8_t>;
using prism::Shard;

constexpr std::uint32_t kVocabulary = 300;
constexpr std::uint32_t kEndOfText = 299;
constexpr std::size_t kRecordsRead = 64;
constexpr std::size_t kElementsRead = 2048;

enum Format : std::uint8_t { kPrism, kLlmc, kMegatron, kDatatrove, kNpy, kRaw, kFormats };
constexpr std::array<const char*, kFormats> kNames = {"prism", "llmc", "megatron", "datatrove", "npy", "raw"};

/// A folder in memory where there is one: every input is written out, since the parsers read files.
struct Workplace {
  std::filesystem::path folder;

  Workplace() {
    const bool shared = std::filesystem::is_directory("/dev/shm");
    folder = shared ? std::filesystem::path("/dev/shm") : std::filesystem::temp_directory_path();
    folder /= "prism-fuzz-" + std::to_string(::getpid());
    std::filesystem::create_directories(folder);
  }
  ~Workplace() { std::filesystem::remove_all(folder); }
};

const std::filesystem::path& workplace() {
  static const Workplace made;
  return made.folder;
}

const std::shared_ptr<const prism::TokenTable>& table() {
  static const auto made = [] {
    std::vector<std::uint64_t> offsets{0};
    std::vector<std::byte> bytes;
    for (std::uint32_t id = 0; id < kVocabulary; ++id) {
      bytes.resize(bytes.size() + (id == kEndOfText ? 0 : id % 5 + 1), std::byte{static_cast<std::uint8_t>(id)});
      offsets.push_back(bytes.size());
    }
    return std::make_shared<const prism::TokenTable>(offsets, bytes);
  }();
  return made;
}

void put(const std::filesystem::path& path, const std::uint8_t* data, std::size_t size) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr || (size != 0 && std::fwrite(data, 1, size, file) != size) || std::fclose(file) != 0)
    std::abort();
}

/// The files of one input, by format: pairs are split by a length in the last two bytes.
std::filesystem::path lay_out(Format format, const std::uint8_t* data, std::size_t size) {
  const auto at = [](const char* name) { return workplace() / name; };
  if (format != kMegatron && format != kDatatrove) {
    const auto path = at(format == kPrism ? "a.prsh" : format == kNpy ? "a.npy" : "a.tok");
    put(path, data, size);
    return path;
  }
  std::size_t cut = 0;
  if (size >= 2) {
    cut = std::min<std::size_t>(data[size - 2] | data[size - 1] << 8, size - 2);
    size -= 2;
  }
  put(at(format == kMegatron ? "a.idx" : "a.ds.index"), data, cut);
  put(at(format == kMegatron ? "a.bin" : "a.ds"), data + cut, size - cut);
  return at(format == kMegatron ? "a.bin" : "a.ds");
}

/// Padded blocks of the records, or of their ends, from the last to the first; now and then of a row that is not there.
void assemble_all(const prism::Shards& shards, std::uint8_t choice) {
  constexpr std::uint64_t kMaxRows = 3;
  constexpr std::uint64_t kCapacity = 4096;
  std::vector<std::int64_t> record, start, length, order;
  for (std::uint64_t i = 0; i < std::min<std::uint64_t>(shards[0]->records(), kRecordsRead); ++i) {
    const auto tokens = static_cast<std::int64_t>(std::min<std::uint64_t>(shards[0]->range(i).length, 1024));
    record.push_back(static_cast<std::int64_t>(i));
    start.push_back(tokens / (1 + choice % 3));
    length.push_back(choice % 5 == 0 ? tokens : tokens - start.back());
  }
  const auto rows = static_cast<std::int64_t>(record.size());
  for (std::int64_t i = rows; i-- > (choice % 7 == 0 ? -1 : 0);) order.push_back(i);
  const bool whole = choice & 32;
  const prism::RowTable table_of_rows = whole ? prism::RowTable{} : prism::RowTable{record, start, length};
  prism::BatchAssembler::Config config;
  config.prefetch = choice % 3;
  config.end_of_text = kEndOfText;
  const std::size_t slots = prism::BatchAssembler::slots(config.prefetch);
  std::vector<std::int32_t> tokens(slots * kCapacity), targets(slots * kCapacity), cu_lengths(slots * (kMaxRows + 1));
  std::vector<std::int64_t> lengths(slots * kMaxRows), bytes(slots * kMaxRows);
  const prism::BlockBuffers buffers{
      prism::TokenBuffers<std::int32_t>{tokens, targets}, lengths, cu_lengths, bytes, kCapacity, kMaxRows};
  prism::BatchAssembler assembler({shards[0]}, table(), table_of_rows, {order, {}, kMaxRows}, buffers, config);
  prism::Block block;
  while (assembler.next(block, 60'000) == prism::BatchAssembler::Wait::ready) {
  }
}

/// Everything a reader does with a shard that opened.
void read_all(const std::shared_ptr<Shard>& shard, std::uint8_t choice) {
  std::vector<std::byte> scratch;
  std::uint64_t sum = 0;
  const auto read = [&](std::uint64_t record) {
    const auto range = shard->range(record);
    prism::with_token_type(shard->token_width(), shard->token_bytes(range.start, range.length, scratch),
                           [&](const auto* ids) {
                             for (std::uint64_t i = 0; i < range.length; ++i) sum += ids[i];
                           });
  };
  for (std::uint64_t i = 0; i < std::min<std::uint64_t>(shard->records(), kRecordsRead); ++i) read(i);
  if (shard->records() != 0) read(shard->records() - 1);
  for (const std::uint64_t id : shard->doc_ids()) sum += id;
  for (const std::byte b : shard->seal()) sum += std::to_integer<unsigned>(b);
  volatile std::uint64_t used = sum;
  (void)used;

  // Each step may refuse what the one before let pass.
  const auto attempt = [](auto&& step) {
    try {
      step();
    } catch (const prism::DataFault&) {
    } catch (const std::invalid_argument&) {
    }
  };
  attempt([&] { shard->verify(nullptr); });
  attempt([&] { shard->verify(table().get()); });
  if (!shard->knows_utf8_bytes()) attempt([&] { shard->count_utf8_bytes(*table()); });
  if (!shard->knows_utf8_bytes()) return;
  const prism::Shards shards{shard, shard};
  if (choice % 4 == 0) attempt([&] { assemble_all(shards, choice); });
  for (const auto basis : {prism::Basis::tokens, prism::Basis::bytes}) {
    attempt([&] {
      prism::StreamCursor cursor(shards, *table(), basis, kEndOfText);
      std::array<std::int64_t, 61> out;
      cursor.skip(choice);
      for (std::size_t done = 0; done < kElementsRead; done += out.size()) {
        if (cursor.pull(out.data(), out.data(), out.size()) < out.size()) break;
        cursor.take_counts();
        cursor.skip(choice % 7);
      }
    });
    if (choice % 16 != 0) continue;
    attempt([&] {
      prism::TokenStream::Config config;
      config.seq_len = 2 + choice % 30;
      config.batch_size = 3;
      config.basis = basis;
      config.end_of_text = kEndOfText;
      const std::size_t size = prism::TokenStream::slots(config.prefetch) * config.batch_size * config.seq_len;
      std::vector<std::int64_t> tokens(size);
      std::vector<std::int64_t> targets(size);
      prism::TokenStream stream(shards, table(), config, prism::TokenBuffers<std::int64_t>{tokens, targets});
      prism::StreamBatch batch;
      for (int i = 0; i < 20 && stream.next(batch, 60'000) == prism::TokenStream::Wait::ready; ++i) {
      }
    });
  }
}

void run_one(Format format, std::uint8_t choice, const std::uint8_t* data, std::size_t size) {
  const auto path = lay_out(format, data, size);
  for (const auto access : {prism::Access::map, prism::Access::pread}) {
    prism::OpenOptions options;
    options.access = access;
    if (choice & 1) options.format = kNames[format];
    if (format == kRaw) options.width = 1u << (choice >> 1 & 3);
    if (choice & 8) options.end_of_text = kEndOfText;
    options.one_record = choice & 16;
    try {
      read_all(prism::open_shard(path, options), choice);
    } catch (const prism::DataFault&) {
    } catch (const prism::FileError&) {
    } catch (const std::invalid_argument&) {
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  run_one(static_cast<Format>(data[0] % kFormats), data[1], data + 2, size - 2);
  return 0;
}

// ------------------------------------------------------------------------------------------ seeds and mutations

namespace {

Bytes contents(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <typename T>
void append(Bytes& out, const std::vector<T>& values) {
  const auto* raw = reinterpret_cast<const std::uint8_t*>(values.data());
  out.insert(out.end(), raw, raw + values.size() * sizeof(T));
}

Bytes paired(Bytes first, const Bytes& second) {
  const std::size_t cut = first.size();
  first.insert(first.end(), second.begin(), second.end());
  first.push_back(static_cast<std::uint8_t>(cut));
  first.push_back(static_cast<std::uint8_t>(cut >> 8));
  return first;
}

/// A valid file of each format.
Bytes seed(Format format, std::mt19937_64& random) {
  std::vector<std::uint32_t> tokens;
  std::vector<std::uint64_t> lengths;
  std::vector<std::uint64_t> bytes;
  for (std::uint64_t records = random() % 9; lengths.size() < records;) {
    lengths.push_back(random() % 3 == 0 ? 0 : random() % 20);
    bytes.push_back(0);
    for (std::uint64_t i = 0; i < lengths.back(); ++i) {
      tokens.push_back(static_cast<std::uint32_t>(random() % (kVocabulary - 1)));
      bytes.back() += table()->length(tokens.back());
    }
  }
  const bool wide = random() % 2;
  Bytes ids;
  std::vector<std::uint64_t> ends;  // tokens, end-of-text after each record
  {
    std::vector<std::uint32_t> flat;
    std::size_t at = 0;
    for (const std::uint64_t length : lengths) {
      flat.insert(flat.end(), tokens.begin() + static_cast<long>(at), tokens.begin() + static_cast<long>(at + length));
      flat.push_back(kEndOfText);
      at += length;
      ends.push_back(flat.size());
    }
    if (wide) {
      append(ids, flat);
    } else {
      append(ids, std::vector<std::uint16_t>(flat.begin(), flat.end()));
    }
  }
  const std::uint64_t width = wide ? 4 : 2;
  const std::uint64_t stored = ids.size() / width;
  switch (format) {
    case kPrism: {
      prism::TokenizerStamp stamp;
      stamp.name = "fuzz";
      stamp.n_vocab = wide ? 0x10001 : kVocabulary;
      stamp.end_of_text = kEndOfText;
      const auto path = workplace() / "seed.prsh";
      prism::ShardWriter writer(path, stamp);
      writer.add(tokens, lengths, bytes, std::vector<std::uint64_t>(lengths.size(), 7));
      writer.finish();
      return contents(path);
    }
    case kLlmc: {
      Bytes out;
      std::vector<std::uint32_t> head(256);
      head[0] = wide ? 20240801 : 20240520;
      head[1] = wide ? 7 : 1;
      head[2] = static_cast<std::uint32_t>(stored);
      append(out, head);
      out.insert(out.end(), ids.begin(), ids.end());
      return out;
    }
    case kMegatron: {
      Bytes index = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};
      append(index, std::vector<std::uint64_t>{1});
      index.push_back(wide ? 4 : 8);
      append(index, std::vector<std::uint64_t>{ends.size(), ends.size() + 1});
      std::vector<std::int32_t> sizes;
      std::vector<std::uint64_t> places;
      std::vector<std::uint64_t> bounds{0};
      std::uint64_t before = 0;
      for (const std::uint64_t end : ends) {
        sizes.push_back(static_cast<std::int32_t>(end - before));
        places.push_back(before * width);
        bounds.push_back(bounds.size());
        before = end;
      }
      append(index, sizes);
      append(index, places);
      append(index, bounds);
      return paired(index, ids);
    }
    case kDatatrove: {
      Bytes index;
      append(index, ends);
      return paired(index, ids);
    }
    case kNpy: {
      std::string head = std::string("{'descr': '") + (wide ? "<u4" : "<u2") + "', 'fortran_order': False, 'shape': (" +
                         std::to_string(stored) + ",), }";
      head.resize((head.size() + 10 + 63) / 64 * 64 - 11, ' ');
      head += '\n';
      Bytes out = {0x93,
                   'N',
                   'U',
                   'M',
                   'P',
                   'Y',
                   1,
                   0,
                   static_cast<std::uint8_t>(head.size()),
                   static_cast<std::uint8_t>(head.size() >> 8)};
      out.insert(out.end(), head.begin(), head.end());
      out.insert(out.end(), ids.begin(), ids.end());
      return out;
    }
    default:
      return ids;
  }
}

/// Makes header and footer agree again, so that a mutated field reaches the checks behind the checksums.
void reseal(Bytes& data) {
  if (data.size() < 320) return;
  const auto sum = [&](std::size_t at, std::size_t size) {
    return prism::xxh64(std::as_bytes(std::span(data).subspan(at, size)));
  };
  const auto store = [&](std::size_t at, std::uint64_t value) { std::memcpy(data.data() + at, &value, 8); };
  store(248, sum(0, 248));
  const std::size_t foot = data.size() - 64;
  std::memcpy(data.data() + foot + 40, data.data() + 248, 8);
  store(foot + 56, sum(foot, 56));
}

void mutate(Bytes& data, std::mt19937_64& random) {
  static constexpr std::array<std::uint64_t, 18> interesting = {0,
                                                                1,
                                                                2,
                                                                3,
                                                                7,
                                                                8,
                                                                63,
                                                                64,
                                                                255,
                                                                256,
                                                                65535,
                                                                65536,
                                                                0x7FFFFFFF,
                                                                0x80000000,
                                                                0xFFFFFFFF,
                                                                std::uint64_t{1} << 56,
                                                                std::uint64_t{1} << 63,
                                                                ~std::uint64_t{0}};
  for (std::uint64_t times = random() % 4 + 1; times > 0; --times) {
    const std::size_t size = data.size();
    const std::size_t at = size == 0 ? 0 : random() % 2 ? random() % size : random() % std::min<std::size_t>(size, 320);
    switch (random() % 9) {
      case 0:
        if (size != 0) data[at] ^= static_cast<std::uint8_t>(1u << random() % 8);
        break;
      case 1:
        if (size != 0) data[at] = static_cast<std::uint8_t>(random());
        break;
      case 2:
      case 3: {  // an aligned word: where fields are
        const std::size_t width = random() % 2 ? 4 : 8;
        const std::size_t field = at / width * width;
        const std::uint64_t value = interesting[random() % interesting.size()] - random() % 2;
        if (field + width <= size) std::memcpy(data.data() + field, &value, width);
        break;
      }
      case 4: {  // a little more or less than what is there
        const std::size_t field = at / 8 * 8;
        std::uint64_t value = 0;
        if (field + 8 > size) break;
        std::memcpy(&value, data.data() + field, 8);
        value += random() % 5 - 2;
        std::memcpy(data.data() + field, &value, 8);
        break;
      }
      case 5:
        data.resize(at);
        break;
      case 6:
        data.resize(size + random() % 130, static_cast<std::uint8_t>(random()));
        break;
      case 7:
        if (size != 0)
          std::copy_n(data.begin(), std::min(size - at, random() % 64), data.begin() + static_cast<long>(at));
        break;
      default:
        if (size != 0) data.erase(data.begin() + static_cast<long>(at));
    }
  }
}

}  // namespace

#ifdef PRISM_LIBFUZZER

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t most);

/// Half of libFuzzer's own mutations, half of ours; new inputs start from a valid file.
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t most, unsigned seed_) {
  std::mt19937_64 random(seed_);
  if (random() % 2 && size >= 2) return LLVMFuzzerMutate(data, size, most);
  Bytes input(data, data + size);
  if (size < 2 || random() % 64 == 0) {
    const auto format = static_cast<Format>(random() % kFormats);
    input = seed(format, random);
    input.insert(input.begin(), {format, static_cast<std::uint8_t>(random())});
  }
  Bytes body(input.begin() + 2, input.end());
  mutate(body, random);
  if (input[0] % kFormats == kPrism && random() % 4 != 0) reseal(body);
  input.resize(2);
  input.insert(input.end(), body.begin(), body.end());
  input.resize(std::min(input.size(), most));
  std::copy(input.begin(), input.end(), data);
  return input.size();
}

#else

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "--replay") {  // one input that libFuzzer saved
    const Bytes data = contents(argc > 2 ? argv[2] : "");
    return LLVMFuzzerTestOneInput(data.data(), data.size());
  }
  const std::uint64_t inputs = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20'000;
  const std::uint64_t start = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  std::array<std::uint64_t, kFormats> opened{};
  for (std::uint64_t i = 0; i < inputs; ++i) {
    std::mt19937_64 random(start + i);  // any failing input is `fuzz_data 1 SEED`
    const auto format = static_cast<Format>(i % kFormats);
    Bytes data = seed(format, random);
    if (i >= kFormats) mutate(data, random);
    if (format == kPrism && random() % 4 != 0) reseal(data);
    const auto choice = static_cast<std::uint8_t>(random());
    if (std::getenv("PRISM_FUZZ_TRACE") != nullptr)
      std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(start + i));
    try {
      run_one(format, choice, data.data(), data.size());
      ++opened[format];
    } catch (const std::exception& error) {
      std::fprintf(stderr, "seed %llu (%s): unexpected %s\n", static_cast<unsigned long long>(start + i),
                   kNames[format], error.what());
      return 1;
    }
  }
  for (std::size_t format = 0; format < kFormats; ++format) {
    std::printf("%s %llu\n", kNames[format], static_cast<unsigned long long>(opened[format]));
  }
  std::puts("no fault");
  return 0;
}
#endif
