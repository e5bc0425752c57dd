// MinHash signatures of documents: the hot loop of near-duplicate removal (megacomposer/data/dedup.py).
//
//   g++ -O3 -shared -fPIC -o megacomposer/data/_minhash.so csrc/minhash.cpp
//
// Plain C ABI, unsigned 64-bit arithmetic only (it wraps by definition), so that the numpy reference
// in dedup.py gives the same signatures bit for bit:
//   word     maximal run of [A-Za-z0-9_] and bytes >= 0x80; hashed by 64-bit FNV-1a
//   shingle  `shingle_words` consecutive words (all of them in a shorter document):
//            h = h * kMultiplier + word, from 0, then the finaliser of splitmix64
//   row k    min over shingles of the upper 32 bits of a[k] * shingle + b[k]

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

constexpr uint64_t kFnvOffset = 0xcbf29ce484222325ULL;
constexpr uint64_t kFnvPrime = 0x100000001b3ULL;
constexpr uint64_t kMultiplier = 0x9e3779b97f4a7c15ULL;

struct WordTable {
  bool is_word[256];
  WordTable() {
    for (int c = 0; c < 256; ++c) {
      is_word[c] = c >= 0x80 || (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') ||
                   (c >= 'a' && c <= 'z') || c == '_';
    }
  }
};

uint64_t Finalise(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

std::vector<uint64_t> Words(const uint8_t* text, int64_t length) {
  static const WordTable table;
  std::vector<uint64_t> words;
  words.reserve(static_cast<size_t>(length / 5 + 1));
  int64_t i = 0;
  while (i < length) {
    if (!table.is_word[text[i]]) {
      ++i;
      continue;
    }
    uint64_t hash = kFnvOffset;
    for (; i < length && table.is_word[text[i]]; ++i) {
      hash = (hash ^ text[i]) * kFnvPrime;
    }
    words.push_back(hash);
  }
  return words;
}

std::vector<uint64_t> Shingles(const std::vector<uint64_t>& words, int64_t shingle_words) {
  std::vector<uint64_t> shingles;
  if (words.empty()) {
    return shingles;
  }
  const size_t span = std::min(words.size(), static_cast<size_t>(shingle_words));
  shingles.reserve(words.size() - span + 1);
  for (size_t first = 0; first + span <= words.size(); ++first) {
    uint64_t hash = 0;
    for (size_t j = 0; j < span; ++j) {
      hash = hash * kMultiplier + words[first + j];
    }
    shingles.push_back(Finalise(hash));
  }
  return shingles;
}

}  // namespace

extern "C" {

// Changes whenever the signatures or the calls do; the loader refuses another number.
int64_t megacomposer_minhash_version() { return 1; }

// Fills signature[permutations] (0xffffffff everywhere for a document without words) and returns
// the number of shingles.
int64_t megacomposer_minhash_signature(const uint8_t* text, int64_t length, int64_t shingle_words,
                                       const uint64_t* a, const uint64_t* b, int64_t permutations,
                                       uint32_t* signature) {
  const std::vector<uint64_t> shingles = Shingles(Words(text, length), shingle_words);
  for (int64_t k = 0; k < permutations; ++k) {
    const uint64_t scale = a[k];
    const uint64_t shift = b[k];
    uint64_t smallest = ~0ULL;
    for (const uint64_t shingle : shingles) {
      // the minimum of the upper bits is the upper bits of the minimum
      smallest = std::min(smallest, scale * shingle + shift);
    }
    signature[k] = static_cast<uint32_t>(smallest >> 32);
  }
  return static_cast<int64_t>(shingles.size());
}

// Writes the shingles of a document, in order and with repeats, to out[capacity]; returns how many
// there are, which may be more than were written.
int64_t megacomposer_minhash_shingles(const uint8_t* text, int64_t length, int64_t shingle_words,
                                      uint64_t* out, int64_t capacity) {
  const std::vector<uint64_t> shingles = Shingles(Words(text, length), shingle_words);
  const size_t written = std::min(shingles.size(), static_cast<size_t>(capacity));
  std::copy_n(shingles.begin(), written, out);
  return static_cast<int64_t>(shingles.size());
}

}  // extern "C"
