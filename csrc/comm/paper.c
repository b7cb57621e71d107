/* paper.c - the communicator of an engine on paper (device/paper.h): the other ranks do what this one does, and no byte
 * moves.  So what ranks compare is the same, and the largest of their numbers is this rank's own. */
#include "comm/comm_impl.h"

#include <stdlib.h>

static gm_status paper_attach(gm_comm *comm, gm_device *dev)
{
    GM_FAIL_IF(dev && !dev->is_paper, GM_ERR_ARG,
               "rank %d of %d: a communicator on paper is none for device %s", comm->rank,
               comm->size, dev->ops->name);
    return GM_OK;
}

static void paper_free(gm_comm *comm)
{
    gm_comm_fini(comm);
    free(comm);
}

static const gm_comm_ops paper_ops = {
    .name = "paper",
    .attach = paper_attach,
    .free = paper_free,
};

gm_status gm_comm_paper_new(int size, gm_comm **out)
{
    *out = NULL;
    gm_comm *comm = calloc(1, sizeof *comm);
    gm_status status = comm ? gm_comm_init(comm, &paper_ops, 0, size)
                            : GM_FAIL(GM_ERR_NOMEM, "HOST: a communicator");
    if (status != GM_OK) {
        free(comm);
        return status;
    }
    *out = comm;
    return GM_OK;
}
