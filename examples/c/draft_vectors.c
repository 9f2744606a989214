/* The LK loss and MXFP4 in plain C, on the suite's test vectors (docs/vectors.md).
 *
 *   cc -std=c99 -O2 -o draft_vectors draft_vectors.c -lm
 *   ./draft_vectors lk_loss DIR/inputs/lk_loss/NAME.safetensors RESULTS/lk_loss/NAME.safetensors
 *
 * -DCLAMP_IN_LOG and -DTIES_AWAY plant two faults that are common in public code; the suite must find them.
 */
#include <math.h>

#include "safetensors.h"

enum { BLOCK = 32 };
static const double E2M1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

static double *doubles(const st_array *a) {
    const size_t n = st_elements(a);
    double *x = malloc((n + 1) * sizeof *x);
    for (size_t i = 0; x && i < n; i++)
        x[i] = !strcmp(a->dtype, "F64") ? ((const double *)a->data)[i] : (double)((const float *)a->data)[i];
    return x;
}

static int is_float(const st_array *a) { return a && (!strcmp(a->dtype, "F64") || !strcmp(a->dtype, "F32")); }

/* An array to write, of the shape of `like` without its last `dropped` axes. */
static st_array output(const char *name, const char *dtype, const void *data, const st_array *like, int dropped) {
    st_array a = *like;
    strcpy(a.name, name);
    strcpy(a.dtype, dtype);
    a.dimensions -= dropped;
    a.data = data;
    a.bytes = st_elements(&a) * st_itemsize(dtype);
    return a;
}

static void log_softmax(const double *x, double *y, size_t n) {
    double top = -INFINITY, sum = 0;
    for (size_t i = 0; i < n; i++) top = fmax(top, x[i]);
    for (size_t i = 0; i < n; i++) sum += exp(x[i] - top);
    for (size_t i = 0; i < n; i++) y[i] = x[i] - top - log(sum);
}

/* -log sum min(p, q) of one slot; gradient by the draft's logits; the mask q < p. log_p and log_q are scratch. */
static double lk_slot(const double *draft, const double *target, double d_loss, double *gradient, unsigned char *below,
                      double *log_p, double *log_q, size_t n) {
    double top = -INFINITY, sum = 0, total = 0;
    log_softmax(target, log_p, n);
    log_softmax(draft, log_q, n);
    for (size_t i = 0; i < n; i++) top = fmax(top, fmin(log_p[i], log_q[i]));
    for (size_t i = 0; i < n; i++) sum += exp(fmin(log_p[i], log_q[i]) - top);
    const double log_alpha = top + log(sum);
    for (size_t i = 0; i < n; i++) {
        below[i] = log_q[i] < log_p[i];
        gradient[i] = below[i] ? exp(log_q[i] - log_alpha) : 0; /* e = q / alpha; at most 1 */
        total += gradient[i];
    }
    for (size_t i = 0; i < n; i++) gradient[i] = d_loss * (exp(log_q[i]) * total - gradient[i]);
#ifdef CLAMP_IN_LOG
    return -log(fmax(exp(log_alpha), 1e-8));
#else
    return -log_alpha;
#endif
}

static int lk_loss(const st_file *in, const char *path) {
    const st_array *draft = st_find(in, "draft_logits"), *target = st_find(in, "target_logits");
    const st_array *cotangent = st_find(in, "cotangent/loss");
    if (!is_float(draft) || !is_float(target) || !is_float(cotangent) || draft->dimensions < 1 ||
        st_elements(draft) != st_elements(target)) {
        fprintf(stderr, "lk_loss needs draft_logits, target_logits of the same shape and cotangent/loss\n");
        return 0;
    }
    const size_t width = draft->shape[draft->dimensions - 1], slots = width ? st_elements(draft) / width : 0;
    double *q = doubles(draft), *p = doubles(target), *d_loss = doubles(cotangent);
    double *loss = calloc(slots + 1, sizeof *loss), *gradient = calloc(slots * width + 1, sizeof *gradient);
    double *scratch = calloc(2 * width + 1, sizeof *scratch);
    unsigned char *below = calloc(slots * width + 1, 1);
    int good = q && p && d_loss && loss && gradient && scratch && below && st_elements(cotangent) == slots;
    for (size_t i = 0; good && i < slots; i++)
        loss[i] = lk_slot(q + i * width, p + i * width, d_loss[i], gradient + i * width, below + i * width, scratch,
                          scratch + width, width);
    if (good) {
        const st_array answer[] = {output("loss", "F64", loss, draft, 1),
                                   output("grad/draft_logits", "F64", gradient, draft, 0),
                                   output("decision/below", "BOOL", below, draft, 0)};
        good = st_write(path, answer, 3);
    }
    free(q), free(p), free(d_loss), free(loss), free(gradient), free(scratch), free(below);
    return good;
}

/* OCP MX v1.0, section 6.3: the code of the nearest E2M1 value, ties to even, saturating. */
static unsigned char encode(double y) {
    const double size = fabs(y), step = size < 2 ? 0.5 : size < 4 ? 1 : 2;
#ifdef TIES_AWAY
    const double rounded = fmin(floor(size / step + 0.5) * step, 6);
#else
    const double rounded = fmin(rint(size / step) * step, 6);
#endif
    unsigned char code = 0;
    while (E2M1[code] < rounded) code++;
    return (unsigned char)(code | (signbit(y) ? 8 : 0));
}

/* One block: the scale byte, and 32 codes. */
static unsigned char quantize(const double *x, unsigned char *codes) {
    double largest = 0;
    for (int i = 0; i < BLOCK; i++) {
        if (!isfinite(x[i])) return 255;
        largest = fmax(largest, fabs(x[i]));
    }
    int exponent = 0;
    frexp(largest, &exponent); /* largest = m 2^exponent with m in [1/2, 1) */
    exponent = exponent - 1 - 2 < -127 ? -127 : exponent - 1 - 2;
    for (int i = 0; i < BLOCK; i++) codes[i] = encode(ldexp(x[i], -exponent));
    return (unsigned char)(largest > 0 ? exponent + 127 : 0);
}

static double decode(unsigned char scale, unsigned char code) {
    if (scale == 255) return NAN;
    return ldexp(code & 8 ? -E2M1[code & 7] : E2M1[code & 7], scale - 127);
}

static int mxfp4(const st_file *in, const char *path, int fake) {
    const st_array *given = st_find(in, "x"), *cotangent = st_find(in, "cotangent/y");
    if (!is_float(given) || given->dimensions < 1 || given->shape[given->dimensions - 1] % BLOCK ||
        (fake && !is_float(cotangent))) {
        fprintf(stderr, "mxfp4 needs x in blocks of %d\n", BLOCK);
        return 0;
    }
    const size_t n = st_elements(given), blocks = n / BLOCK;
    double *x = doubles(given);
    unsigned char *codes = calloc(n + 1, 1), *scales = calloc(blocks + 1, 1);
    int good = x && codes && scales;
    for (size_t b = 0; good && b < blocks; b++) scales[b] = quantize(x + b * BLOCK, codes + b * BLOCK);
    if (good && fake) {
        for (size_t i = 0; i < n; i++) x[i] = decode(scales[i / BLOCK], codes[i]);
        const st_array answer[] = {output("y", "F64", x, given, 0), output("grad/x", cotangent->dtype, cotangent->data, given, 0)};
        good = st_write(path, answer, 2); /* straight through: the gradient is the cotangent */
    } else if (good) {
        st_array per_block = *given;
        per_block.shape[given->dimensions - 1] /= BLOCK;
        const st_array answer[] = {output("scales", "U8", scales, &per_block, 0), output("codes", "U8", codes, given, 0)};
        good = st_write(path, answer, 2);
    }
    free(x), free(codes), free(scales);
    return good;
}

static int mxfp4_decode(const st_file *in, const char *path) {
    const st_array *scales = st_find(in, "scales"), *codes = st_find(in, "codes");
    if (!scales || !codes || strcmp(scales->dtype, "U8") || strcmp(codes->dtype, "U8") ||
        st_elements(scales) * BLOCK != st_elements(codes)) {
        fprintf(stderr, "mxfp4_decode needs scales and codes in U8\n");
        return 0;
    }
    const size_t n = st_elements(codes);
    double *values = malloc((n + 1) * sizeof *values);
    for (size_t i = 0; values && i < n; i++)
        values[i] = decode(((const unsigned char *)scales->data)[i / BLOCK], ((const unsigned char *)codes->data)[i]);
    const st_array answer = output("values", "F64", values, codes, 0);
    const int good = values && st_write(path, &answer, 1);
    free(values);
    return good;
}

int main(int count, char **arguments) {
    if (count != 4) {
        fprintf(stderr, "usage: %s METHOD INPUT.safetensors OUTPUT.safetensors\n", arguments[0]);
        return 2;
    }
    static st_file in;
    const char *method = arguments[1], *path = arguments[3];
    int good = st_read(arguments[2], &in);
    if (good && !strcmp(method, "lk_loss")) good = lk_loss(&in, path);
    else if (good && !strcmp(method, "mxfp4")) good = mxfp4(&in, path, 0);
    else if (good && !strcmp(method, "fake_mxfp4")) good = mxfp4(&in, path, 1);
    else if (good && !strcmp(method, "mxfp4_decode")) good = mxfp4_decode(&in, path);
    else if (good) {
        fprintf(stderr, "%s is not offered\n", method);
        good = 0;
    }
    st_free(&in);
    return good ? 0 : 1;
}
