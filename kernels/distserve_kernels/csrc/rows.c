/* Blocks of several page tensors into one buffer and back: what a transfer packs and unpacks. */
#include "vec.h"

#include <stdint.h>
#include <string.h>

/* For every tensor, every block of the list and every one of `outer` parts of a block: `row` bytes at `offset`,
   parts lie `stride` bytes apart. The buffer holds them one after the other.

   Returns -1, or the position of the first id in `blocks` that is none of the `num_blocks`; nothing is copied
   then. */
EXPORT int64_t copy_rows(char *const *tensors, int64_t num_tensors, int64_t num_blocks, int64_t block_bytes,
                         const int64_t *blocks, int64_t count, int64_t outer, int64_t stride, int64_t offset,
                         int64_t row, char *buffer, int to_buffer) {
    for (int64_t i = 0; i < count; i++)
        if (blocks[i] < 0 || blocks[i] >= num_blocks) return i;
    for (int64_t t = 0; t < num_tensors; t++)
        for (int64_t i = 0; i < count; i++) {
            char *part = tensors[t] + blocks[i] * block_bytes + offset;
            for (int64_t o = 0; o < outer; o++, part += stride, buffer += row) {
                if (to_buffer)
                    memcpy(buffer, part, row);
                else
                    memcpy(part, buffer, row);
            }
        }
    return -1;
}
