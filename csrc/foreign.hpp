// Token files that other tools write, read in place as shards. Every size is checked before it is followed.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "shard.hpp"

namespace prism {

/// How to read a file that does not say everything itself.
struct OpenOptions {
  /// "" (told from the content), "prism", "llmc", "megatron", "datatrove", "npy" or "raw".
  std::string format;
  /// Bytes per token of headerless files (and of .ds files whose index is empty); 0: not named.
  unsigned width = 0;
  /// Id that separates documents. Where an index gives the documents, it is taken off their ends.
  std::optional<std::uint64_t> end_of_text;
  /// Without an index and without an end-of-text: the whole file is one record.
  bool one_record = false;
  Access access = Access::automatic;
};

/// Opens a shard of any format. Throws DataFault when the file contradicts itself or does not say where its documents
/// end; FileError when it cannot be read.
///
/// llmc       1,024-byte header: i32 magic 20240520 version 1 (u16 ids) or 20240801 version 7 (u32), i32 count
/// megatron   PREFIX.idx (9-byte magic MMIDIDX, u64 version 1, u8 dtype code, u64 sequences, u64 documents + 1, i32
///            lengths, i64 byte offsets, i64 first sequence of each document: unaligned from byte 34) + PREFIX.bin
/// datatrove  NAME.ds (u16 or u32 ids) + NAME.ds.index (u64 document ends, in tokens)
/// npy        a 1-D array of u1, u2, u4, u8, i4 or i8
/// raw        ids of a named width and nothing else
std::shared_ptr<Shard> open_shard(const std::string& path, const OpenOptions& options);

}  // namespace prism
