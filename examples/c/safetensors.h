/* safetensors, read and written: as much of the format as the test vectors need, in C99, for little-endian machines.
 *
 * A file is eight bytes with the length of the header, the header in JSON, the data:
 *   {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
 */
#ifndef SAFETENSORS_H
#define SAFETENSORS_H

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ST_ARRAYS = 256, ST_DIMENSIONS = 8, ST_NAME = 128 };

typedef struct {
    char name[ST_NAME], dtype[8];
    int dimensions;
    size_t shape[ST_DIMENSIONS], bytes;
    const void *data;
} st_array;

typedef struct {
    int count;
    st_array arrays[ST_ARRAYS];
    unsigned char *buffer; /* what the arrays point into */
} st_file;

static inline size_t st_elements(const st_array *a) {
    size_t n = 1;
    for (int i = 0; i < a->dimensions; i++) n *= a->shape[i];
    return n;
}

static inline size_t st_itemsize(const char *dtype) {
    if (!strcmp(dtype, "F64") || !strcmp(dtype, "I64")) return 8;
    if (!strcmp(dtype, "F32") || !strcmp(dtype, "I32")) return 4;
    return !strcmp(dtype, "U8") || !strcmp(dtype, "BOOL") ? 1 : 0;
}

static inline const st_array *st_find(const st_file *f, const char *name) {
    for (int i = 0; i < f->count; i++)
        if (!strcmp(f->arrays[i].name, name)) return &f->arrays[i];
    return NULL;
}

/* -- reading: each function moves *p on and returns whether it found what it wanted ------------------------------ */

static inline int st_char(const char **p, char wanted) {
    while (**p == ' ' || **p == '\n' || **p == '\t' || **p == '\r') ++*p;
    if (**p != wanted) return 0;
    ++*p;
    return 1;
}

static inline int st_string(const char **p, char *into, size_t size) { /* without escapes: no name here needs any */
    size_t n = 0;
    if (!st_char(p, '"')) return 0;
    for (; **p && **p != '"' && **p != '\\' && n + 1 < size; ++*p) into[n++] = **p;
    into[n] = 0;
    return st_char(p, '"');
}

static inline int st_numbers(const char **p, size_t *into, int limit, int *count) {
    *count = 0;
    if (!st_char(p, '[')) return 0;
    if (st_char(p, ']')) return 1;
    do {
        char *end;
        st_char(p, ' ');
        if (*count == limit || **p < '0' || **p > '9') return 0;
        into[(*count)++] = (size_t)strtoull(*p, &end, 10);
        *p = end;
    } while (st_char(p, ','));
    return st_char(p, ']');
}

static inline int st_entry(const char **p, st_array *a, const unsigned char *data, size_t size) {
    size_t offsets[2] = {1, 0}, elements = 1;
    int given = 0;
    if (!st_char(p, '{')) return 0;
    do {
        char key[16];
        if (!st_string(p, key, sizeof key) || !st_char(p, ':')) return 0;
        if (!strcmp(key, "dtype")) given += st_string(p, a->dtype, sizeof a->dtype);
        else if (!strcmp(key, "shape")) given += st_numbers(p, a->shape, ST_DIMENSIONS, &a->dimensions);
        else if (!strcmp(key, "data_offsets")) {
            int count;
            given += st_numbers(p, offsets, 2, &count) && count == 2;
        } else return 0;
    } while (st_char(p, ','));
    if (given != 3 || !st_char(p, '}') || offsets[0] > offsets[1] || offsets[1] > size) return 0;
    a->bytes = offsets[1] - offsets[0];
    for (int i = 0; i < a->dimensions; i++) {
        if (a->shape[i] && elements > size / a->shape[i]) return 0;
        elements *= a->shape[i];
    }
    a->data = data + offsets[0];
    return elements * st_itemsize(a->dtype) == a->bytes;
}

static inline int st_parse(st_file *f, size_t size) {
    uint64_t length;
    if (size < 8) return 0;
    memcpy(&length, f->buffer, 8);
    if (length > size - 8) return 0;
    char *header = calloc(1, (size_t)length + 1);
    const char *p = header;
    const unsigned char *data = f->buffer + 8 + length;
    if (!header) return 0;
    memcpy(header, f->buffer + 8, (size_t)length);
    int good = st_char(&p, '{'), more = good && !st_char(&p, '}');
    while (more) {
        st_array *a = &f->arrays[f->count];
        good = f->count < ST_ARRAYS && st_string(&p, a->name, ST_NAME) && st_char(&p, ':') &&
               st_entry(&p, a, data, size - 8 - (size_t)length);
        f->count += good;
        more = good && st_char(&p, ',');
    }
    free(header);
    return good;
}

/* 1, or 0 with a sentence on stderr. st_free gives back what it took. */
static inline int st_read(const char *path, st_file *f) {
    memset(f, 0, sizeof *f);
    FILE *in = fopen(path, "rb");
    long size = -1;
    if (in && !fseek(in, 0, SEEK_END)) size = ftell(in);
    if (size >= 0 && !fseek(in, 0, SEEK_SET) && (f->buffer = malloc((size_t)size + 1)) &&
        fread(f->buffer, 1, (size_t)size, in) == (size_t)size && st_parse(f, (size_t)size)) {
        fclose(in);
        return 1;
    }
    if (in) fclose(in);
    fprintf(stderr, "%s cannot be read as safetensors\n", path);
    return 0;
}

static inline void st_free(st_file *f) { free(f->buffer); }

/* -- writing ------------------------------------------------------------------------------------------------------ */

static inline int st_write(const char *path, const st_array *arrays, int count) {
    char header[8192];
    size_t n = 0, end = 0;
    for (int i = 0; i < count && n < sizeof header / 2; i++) {
        n += (size_t)sprintf(header + n, "%c\"%s\":{\"dtype\":\"%s\",\"shape\":[", i ? ',' : '{', arrays[i].name,
                             arrays[i].dtype);
        for (int k = 0; k < arrays[i].dimensions; k++)
            n += (size_t)sprintf(header + n, "%s%zu", k ? "," : "", arrays[i].shape[k]);
        n += (size_t)sprintf(header + n, "],\"data_offsets\":[%zu,%zu]}", end, end + arrays[i].bytes);
        end += arrays[i].bytes;
    }
    header[n++] = '}';
    while (n % 8) header[n++] = ' ';
    FILE *out = fopen(path, "wb");
    const uint64_t length = n;
    int good = out && fwrite(&length, 8, 1, out) == 1 && fwrite(header, 1, n, out) == n;
    for (int i = 0; i < count; i++)
        good = good && fwrite(arrays[i].data, 1, arrays[i].bytes, out) == arrays[i].bytes;
    if (out) good = !fclose(out) && good;
    if (!good) fprintf(stderr, "%s cannot be written\n", path);
    return good;
}

#endif
