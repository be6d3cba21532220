// Runs the CPU engine for another process: reads calls from standard input and writes what they changed to standard
// output. Compiled for another processor or system and run by an emulator, it lets the tests of one machine try the
// engine of another. Usage: replay engine.so
//
// A request is a row of int64: function (0 forward, 1 backward, 2 record), values in the call, tensors; then for each
// tensor its bytes in memory, and where the call holds its address; then the call; then the tensors' memory. The answer
// is the function's result and the tensors' memory.
#ifdef _WIN32
#include <fcntl.h>
#include <io.h>
#include <windows.h>
#else
#include <dlfcn.h>
#endif

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

void read(void* at, size_t bytes) {
  if (std::fread(at, 1, bytes, stdin) != bytes) std::exit(std::feof(stdin) ? 0 : 1);
}

void write(const void* at, size_t bytes) {
  if (std::fwrite(at, 1, bytes, stdout) != bytes) std::exit(1);
}

using Function = int64_t (*)(const void*);

#ifdef _WIN32
HMODULE load(const char* path) {
  _setmode(_fileno(stdin), _O_BINARY);
  _setmode(_fileno(stdout), _O_BINARY);
  HMODULE library = LoadLibraryA(path);
  if (!library) std::fprintf(stderr, "%s: error %lu\n", path, GetLastError());
  return library;
}

Function find(HMODULE library, const char* name) {
  return reinterpret_cast<Function>(reinterpret_cast<void*>(GetProcAddress(library, name)));
}
#else
void* load(const char* path) {
  void* library = dlopen(path, RTLD_NOW);
  if (!library) std::fprintf(stderr, "%s\n", dlerror());
  return library;
}

Function find(void* library, const char* name) { return reinterpret_cast<Function>(dlsym(library, name)); }
#endif

}  // namespace

int main(int, char** arguments) {
  const auto engine = load(arguments[1]);
  if (!engine) return 1;
  const char* names[] = {"dm_forward", "dm_backward", "dm_record"};
  for (;;) {
    int64_t header[3];
    read(header, sizeof header);
    std::vector<int64_t> tensors(2 * header[2]), call(header[1]);
    read(tensors.data(), 8 * tensors.size());
    read(call.data(), 8 * call.size());
    std::vector<std::vector<char>> memory;
    for (int64_t i = 0; i < header[2]; i++) {
      memory.emplace_back(tensors[2 * i] + 1);  // an empty tensor has an address, too
      read(memory.back().data(), tensors[2 * i]);
      call[tensors[2 * i + 1]] = reinterpret_cast<int64_t>(memory.back().data());
    }
    const int64_t result = find(engine, names[header[0]])(call.data());
    write(&result, sizeof result);
    for (int64_t i = 0; i < header[2]; i++) write(memory[i].data(), tensors[2 * i]);
    std::fflush(stdout);
  }
}
