//! DDP segments and RDMAP messages as bytes, good and bad (RFC 5041 §4, RFC 5040 §4): nothing here
//! is checked.

/// An untagged segment.
pub fn untagged(control: u8, opcode: u8, qn: u32, msn: u32, mo: u32, payload: &[u8]) -> Vec<u8> {
    invalidating(control, opcode, 0, qn, msn, mo, payload)
}

/// An untagged segment with an Invalidate STag.
pub fn invalidating(
    control: u8,
    opcode: u8,
    stag: u32,
    qn: u32,
    msn: u32,
    mo: u32,
    payload: &[u8],
) -> Vec<u8> {
    let numbers = [stag, qn, msn, mo].map(u32::to_be_bytes).concat();
    [&[control, opcode], &numbers[..], payload].concat()
}

/// A tagged segment.
pub fn tagged(control: u8, opcode: u8, stag: u32, to: u64, payload: &[u8]) -> Vec<u8> {
    [
        &[control, opcode],
        &stag.to_be_bytes()[..],
        &to.to_be_bytes(),
        payload,
    ]
    .concat()
}

/// A Send of one segment.
pub fn send(msn: u32, payload: &[u8]) -> Vec<u8> {
    untagged(0x41, 0x43, 0, msn, 0, payload)
}

/// An RDMA Write of one segment.
pub fn write(stag: u32, to: u64, payload: &[u8]) -> Vec<u8> {
    tagged(0xc1, 0x40, stag, to, payload)
}

/// A Read Response of one segment.
pub fn read_response(stag: u32, to: u64, payload: &[u8]) -> Vec<u8> {
    tagged(0xc1, 0x42, stag, to, payload)
}

/// STag of every sink that [`read_request`] names.
pub const SINK_STAG: u32 = 0x77;
/// The tagged offset of the sink.
pub const SINK_TO: u64 = 0x1000;

/// A Read Request.
pub fn read_request(msn: u32, source: u32, to: u64, len: u32) -> Vec<u8> {
    untagged(0x41, 0x41, 1, msn, 0, &read_header(SINK_TO, len, source, to))
}

/// The RDMAP header of a Read Request (RFC 5040 §4.4).
pub fn read_header(sink_to: u64, len: u32, source: u32, to: u64) -> Vec<u8> {
    let mut header = SINK_STAG.to_be_bytes().to_vec();
    header.extend(sink_to.to_be_bytes());
    header.extend(len.to_be_bytes());
    header.extend(source.to_be_bytes());
    header.extend(to.to_be_bytes());
    header
}

/// A Terminate with this payload.
pub fn terminate(payload: &[u8]) -> Vec<u8> {
    untagged(0x41, 0x47, 2, 1, 0, payload)
}

/// The Terminate that answers `ulpdu` (RFC 5040 §4.8, figure 10). `error`: layer and error type,
/// error code.
pub fn complaint(error: u16, ulpdu: &[u8]) -> Vec<u8> {
    const M_AND_D: u8 = 0xc0;
    const R: u8 = 0x20;
    let [first, code] = error.to_be_bytes();
    let bare = first >> 4 == 2 || first == 0;
    if bare {
        return terminate(&[first, code, 0, 0]);
    }
    let len = (ulpdu.len() as u16).to_be_bytes();
    let header_len = if ulpdu.first().is_some_and(|control| control & 0x80 != 0) {
        14
    } else {
        18
    };
    let Some(header) = ulpdu.get(..header_len) else {
        // M alone: too short for a header.
        return terminate(&[first, code, 0x80, 0, len[0], len[1]]);
    };
    let read_request = match (first, ulpdu[1] & 0xf, ulpdu.get(18..46)) {
        (0x01, 1, Some(header)) => header,
        _ => &[],
    };
    let present = M_AND_D | if read_request.is_empty() { 0 } else { R };
    terminate(&[&[first, code, present, 0], &len[..], header, read_request].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::framing::Framing;
    use crate::peer::hex;

    /// Conformance §13.4 and §13.5.
    #[test]
    fn vectors() {
        let fpdu = |ulpdu: &[u8]| Framing::default().frame(ulpdu);
        assert_eq!(
            fpdu(&send(1, b"hello")),
            hex("00174143 00000000 00000000 00000001 00000000 68656c6c 6f000000 b990b10c")
        );
        assert_eq!(
            fpdu(&write(0x1234, 0x10, b"abcd")),
            hex("0012c140 00001234 00000000 00000010 61626364 ef900ad8")
        );
        assert_eq!(
            fpdu(&complaint(0x2002, &[])),
            hex("00164147 00000000 00000002 00000001 00000000 20020000 7fe42585")
        );
        assert_eq!(
            fpdu(&complaint(0x1101, &write(0x1234, 0x10, b"abcd"))),
            hex(
                "00264147 00000000 00000002 00000001 00000000 1101c000 0012c140 00001234 00000000 00000010 be4e9fb4"
            )
        );
        let mut header = 0x100_u32.to_be_bytes().to_vec();
        header.extend(hex("00007f00 00001000 00001000 00000200 00007f00 00002000"));
        assert_eq!(
            fpdu(&complaint(0x0102, &untagged(0x41, 0x41, 1, 1, 0, &header))),
            hex(
                "00464147 00000000 00000002 00000001 00000000 0102e000 002e4141 00000000 00000001 00000001 00000000 \
                 00000100 00007f00 00001000 00001000 00000200 00007f00 00002000 a85f4cd6"
            )
        );
    }
}
