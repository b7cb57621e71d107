/* paper.c - the communicator of an engine on paper (device/paper.h): the other ranks do what this
 * one does, and no byte moves.  So what ranks compare is the same, and the largest of their numbers
 * is this rank's own. */
#include "comm/comm_impl.h"

static gm_status paper_attach(gm_comm *comm, gm_device *dev)
{
    GM_FAIL_IF(dev && !dev->is_paper, GM_ERR_ARG,
               "rank %d of %d: a communicator on paper is none for device %s", comm->rank,
               comm->size, dev->ops->name);
    return GM_OK;
}

static const gm_comm_ops paper_ops = {
    .name = "paper",
    .attach = paper_attach,
    .free = gm_comm_release,
};

gm_status gm_comm_paper_new(int size, gm_comm **out)
{
    return gm_comm_new(&paper_ops, sizeof(gm_comm), 0, size, out);
}
