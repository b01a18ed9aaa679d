/* Copies between maps in panels and the planes that spatial operations work on. */
#include <string.h>

#include "run.h"

planes_t read_planes(
    context_t *context, int buffer, const shape_t *shape, ptrdiff_t channel, int count, ptrdiff_t begin,
    ptrdiff_t end) {
    if (buffer == 0)
        return (planes_t){context->image + channel * num_pixels(shape), num_pixels(shape)};
    const ptrdiff_t stride = context->plan->plane;
    float *planes = context->own->planes;
    for (ptrdiff_t pixel = begin / PANEL * PANEL; pixel < end; pixel += PANEL) {
        const float *from = context->sample->buffers[buffer] + pixel / PANEL * shape->panel + channel * PANEL;
        for (int c = 0; c < count; c++)
            memcpy(planes + c * stride + pixel, from + c * PANEL, PANEL * sizeof *planes);
    }
    return (planes_t){planes, stride};
}

void write_plane(context_t *context, int buffer, const shape_t *shape, ptrdiff_t channel, const float *plane) {
    float *to = context->sample->buffers[buffer] + channel * PANEL;
    for (int panel = 0; panel < num_panels(shape); panel++)
        memcpy(to + panel * shape->panel, plane + (ptrdiff_t)panel * PANEL, PANEL * sizeof *to);
}
