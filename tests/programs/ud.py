# Sends a datagram from one UD queue pair of pyverbs to another, and checks what arrives: the GRH
# with its IPv4 header, the data, the sender's number.
import pyverbs.enums as e
from pyverbs.addr import AH, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

QKEY = 0x1234
GID_INDEX = 3
GRH = 40
DATA = b'datagram of pyverbs'

context = Context(name='urnic0')
pd = PD(context)
cq = CQ(context, 10)


def queue_pair():
    attr = QPAttr(port_num=1)
    attr.qkey = QKEY
    cap = QPCap(4, 4, 1, 1)
    return QP(pd, QPInitAttr(qp_type=e.IBV_QPT_UD, scq=cq, rcq=cq, cap=cap), attr)


def memory():
    return MR(pd, 4096, e.IBV_ACCESS_LOCAL_WRITE)


sender, receiver = queue_pair(), queue_pair()
source, target = memory(), memory()
receiver.post_recv(RecvWR(1, num_sge=1, sg=[SGE(target.buf, 4096, target.lkey)]))

gid = context.query_gid(1, GID_INDEX)
route = GlobalRoute(dgid=gid, sgid_index=GID_INDEX)
handle = AH(pd, attr=AHAttr(port_num=1, is_global=1, gr=route))
source.write(DATA, len(DATA))
request = SendWR(2, num_sge=1, sg=[SGE(source.buf, len(DATA), source.lkey)], opcode=e.IBV_WR_SEND)
request.set_wr_ud(handle, receiver.qp_num, QKEY)
sender.post_send(request)

done = {}
while len(done) < 2:
    _, completions = cq.poll(2)
    for completion in completions or []:
        assert completion.status == e.IBV_WC_SUCCESS, completion
        done[completion.wr_id] = completion

received = done[1]
assert received.byte_len == GRH + len(DATA), received
assert received.src_qp == sender.qp_num, received
assert received.wc_flags & e.IBV_WC_GRH, received
assert target.read(1, GRH - 20) == b'\x45', 'an IPv4 header'
assert target.read(len(DATA), GRH) == DATA
print('received', DATA.decode())
