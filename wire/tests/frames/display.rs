//! Each frame is displayed in one line, as by tcpdump.

use crate::vectors::{SEGMENTS, STARTUP};
use std::collections::BTreeMap;
use urnic_wire::mpa::fpdu::{self, CrcMode};
use urnic_wire::rdmap::{Segment, Terminate};

#[test]
fn startup_frames() {
    let lines: BTreeMap<_, _> = STARTUP
        .iter()
        .map(|(name, frame)| (*name, frame.to_string()))
        .collect();
    let expected = [
        ("MPA-REQ-R1", "MPA Request rev 1 flags [C] private data 0"),
        ("MPA-REP-R1", "MPA Reply rev 1 flags [C] private data 0"),
        ("MPA-REP-R1-REJ", "MPA Reply rev 1 flags [CR] private data 2"),
        ("MPA-REQ-R1-MC", "MPA Request rev 1 flags [MC] private data 0"),
        ("MPA-REQ-R1-NOCRC", "MPA Request rev 1 flags [] private data 0"),
        ("MPA-REQ-R0-RDMAC", "MPA Request rev 0 flags [MC] private data 0"),
        (
            "MPA-REQ-R2-P2P",
            "MPA Request rev 2 flags [CS] p2p ird 16 ord 8 rtr write|read private data 0",
        ),
        (
            "MPA-REP-R2-P2P",
            "MPA Reply rev 2 flags [CS] p2p ird 8 ord 16 rtr read private data 0",
        ),
        (
            "MPA-REQ-R2-CS",
            "MPA Request rev 2 flags [CS] client/server ird 16 ord 8 private data 0",
        ),
        (
            "MPA-REQ-R2-ALLRTR",
            "MPA Request rev 2 flags [CS] p2p ird 1 ord 1 rtr send|write|read private data 0",
        ),
        (
            "MPA-REQ-R2-NONEG",
            "MPA Request rev 2 flags [CS] client/server ird any ord any private data 0",
        ),
        (
            "MPA-REQ-R2-PD",
            "MPA Request rev 2 flags [CS] p2p ird 16 ord 8 rtr write|read private data 4",
        ),
        (
            "MPA-REQ-R2-RPCRDMA",
            "MPA Request rev 2 flags [CS] p2p ird 16 ord 1 rtr read private data 8",
        ),
        ("S001-REQ", "MPA Request rev 1 flags [CS] private data 0"),
        ("S001-REP", "MPA Reply rev 1 flags [CS] private data 0"),
        ("S001-RTR-hex", "MPA RTR rev 1 flags [] private data 0"),
        ("S001-RTR-ascii", "MPA RTR rev 1 flags [] private data 0"),
    ];
    assert_eq!(lines, expected.map(|(name, line)| (name, line.to_owned())).into());
}

#[test]
fn segments() {
    let lines: BTreeMap<_, _> = SEGMENTS
        .iter()
        .map(|(name, segment)| (*name, segment.to_string()))
        .collect();
    let expected = [
        ("F-WRITE0-RTR", "RDMAP Write stag 0x00000001 to 0x0 last length 0"),
        (
            "F-RREQ0-RTR",
            "RDMAP ReadRequest qn 1 msn 1 mo 0 last: size 0 from stag 0x00000001 to 0x0 into stag 0x00000001 to 0x0",
        ),
        (
            "F-RREQ0-RTR-siw",
            "RDMAP ReadRequest qn 1 msn 1 mo 0 last: size 0 from stag 0x00000001 to 0x0 into stag 0x00000000 to 0x0",
        ),
        (
            "F-RRESP0",
            "RDMAP ReadResponse stag 0x00000001 to 0x0 last length 0",
        ),
        ("F-SEND0-RTR", "RDMAP Send qn 0 msn 1 mo 0 last length 0"),
        ("F-SEND-hello", "RDMAP Send qn 0 msn 1 mo 0 last length 5"),
        ("F-SENDSE-hello", "RDMAP SendSE qn 0 msn 1 mo 0 last length 5"),
        (
            "F-SENDINV-hello",
            "RDMAP SendInv qn 0 msn 1 mo 0 last invalidate 0x11223344 length 5",
        ),
        (
            "F-SENDSEINV-hello",
            "RDMAP SendSEInv qn 0 msn 1 mo 0 last invalidate 0x11223344 length 5",
        ),
        (
            "F-WRITE-abcd",
            "RDMAP Write stag 0x00001234 to 0x10 last length 4",
        ),
        (
            "F-RREQ-4096",
            "RDMAP ReadRequest qn 1 msn 1 mo 0 last: size 4096 from stag 0x00000200 to 0x7f0000002000 \
             into stag 0x00000100 to 0x7f0000001000",
        ),
        (
            "F-RRESP-abcd",
            "RDMAP ReadResponse stag 0x00000100 to 0x7f0000001000 last length 4",
        ),
        (
            "F-ATOMIC-FADD",
            "RDMAP AtomicRequest qn 1 msn 1 mo 0 last: id 85 stag 0x00000200 to 0x7f0000002000 FetchAdd 0x1 mask 0x0",
        ),
        (
            "F-ATOMIC-CSWAP",
            "RDMAP AtomicRequest qn 1 msn 2 mo 0 last: id 86 stag 0x00000200 to 0x7f0000002000 \
             CmpSwap 0x2222/0xffffffffffffffff -> 0x1111/0xffffffffffffffff",
        ),
        (
            "F-ATOMIC-RESP",
            "RDMAP AtomicResponse qn 3 msn 1 mo 0 last: id 85 original 0x2222",
        ),
        (
            "F-IMM",
            "RDMAP Immediate qn 0 msn 1 mo 0 last: data 0x0102030405060708",
        ),
        (
            "F-IMMSE",
            "RDMAP ImmediateSE qn 0 msn 1 mo 0 last: data 0x0102030405060708",
        ),
        (
            "F-TERM-202",
            "RDMAP Terminate qn 2 msn 1 mo 0 last: 2/0/02 MPA CRC error",
        ),
        (
            "F-TERM-205",
            "RDMAP Terminate qn 2 msn 1 mo 0 last: 2/0/05 MPA local catastrophic error",
        ),
        (
            "F-TERM-206",
            "RDMAP Terminate qn 2 msn 1 mo 0 last: 2/0/06 MPA insufficient IRD",
        ),
        (
            "F-TERM-207",
            "RDMAP Terminate qn 2 msn 1 mo 0 last: 2/0/07 MPA no matching RTR",
        ),
        (
            "F-TERM-RREQ-012",
            "RDMAP Terminate qn 2 msn 1 mo 0 last: 0/1/02 RDMAP access rights violation, segment length 46, \
             qn 1 msn 1 mo 0 last, size 4096 from stag 0x00000200 to 0x7f0000002000 \
             into stag 0x00000100 to 0x7f0000001000",
        ),
        (
            "F-TERM-WRITE-111",
            "RDMAP Terminate qn 2 msn 1 mo 0 last: 1/1/01 DDP base or bounds violation, segment length 18, \
             stag 0x00001234 to 0x10 last",
        ),
        (
            "F-TERM-QN-121",
            "RDMAP Terminate qn 2 msn 1 mo 0 last: 1/2/01 DDP invalid QN, segment length 23, qn 9 msn 1 mo 0 last",
        ),
        (
            "F-TERM-OPC-026",
            "RDMAP Terminate qn 2 msn 1 mo 0 last: 0/2/06 RDMAP unexpected opcode, segment length 23, \
             qn 0 msn 1 mo 0 last",
        ),
        (
            "F-TERM-INV-019",
            "RDMAP Terminate qn 2 msn 1 mo 0 last: 0/1/09 RDMAP STag protected from invalidation, \
             segment length 23, qn 0 msn 1 mo 0 last",
        ),
    ];
    assert_eq!(lines, expected.map(|(name, line)| (name, line.to_owned())).into());
}

#[test]
fn unknown_terminate_and_errors() {
    assert_eq!(
        Terminate::parse(&[0x5a, 5, 0, 0]).unwrap().to_string(),
        "5/10/05 unknown error"
    );
    let error = |bytes: &[u8]| Segment::parse(bytes).unwrap_err().to_string();
    assert_eq!(
        error(&[]),
        "DDP segment of 0 bytes is shorter than its header of 1"
    );
    assert_eq!(
        error(&[0xc1; 3]),
        "DDP segment of 3 bytes is shorter than its header of 14"
    );
    assert_eq!(error(&[0xc2; 14]), "DDP version 2 in a tagged segment");
    assert_eq!(error(&[0x40; 18]), "DDP version 0 in an untagged segment");
    assert_eq!(error(&[0xc1; 14]), "RDMAP version 3");
    assert_eq!(
        error(&[0x41; 18]),
        "ReadRequest on queue 1094795585, which does not exist"
    );
    let fpdu = fpdu::parse(&[0, 0, 0, 0, 1, 0, 0, 0], CrcMode::On).unwrap_err();
    assert_eq!(fpdu.to_string(), "FPDU CRC is 0x00000001, computed 0x48674bc7");
}
