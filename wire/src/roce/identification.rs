//! The ICRC of a packet whose IPv4 identification is not known.
//!
//! The ICRC covers the identification, which a UDP socket does not report. Linux's rdma_rxe numbers
//! its packets. A CRC is linear: the identification adds to it a polynomial of degree 15 times a
//! power of x that follows from the packet's length. So an ICRC that was computed for the
//! identification 0 is right for some other one exactly if the difference, divided by that power,
//! has a degree less than 16.
//!
//! The 16 bits that are left detect fewer errors than 32: one of 65536 packets with many wrong bits
//! passes. Ethernet's own CRC covers each link.

/// The polynomial of CRC-32. In all numbers here, the most significant bit is the coefficient of
/// x^0.
const POLYNOMIAL: u32 = 0xedb8_8320;
const ONE: u32 = 1 << 31;

/// Bytes of IPv4 header and UDP header after the identification, and those of the CRC's register.
const AFTER_IDENTIFICATION: usize = 14 + 8 + 4;

const FINE_BITS: u32 = 6;
const FINE: [u32; 1 << FINE_BITS] = powers(1);
const COARSE: [u32; 256] = powers(1 << FINE_BITS);

/// The inverses of x^(8·step·n), for each n.
const fn powers<const N: usize>(step: usize) -> [u32; N] {
    let (mut table, mut value, mut index) = ([0; N], ONE, 0);
    while index < N {
        table[index] = value;
        let mut bit = 0;
        while bit < 8 * step {
            value = divided_by_x(value);
            bit += 1;
        }
        index += 1;
    }
    table
}

const fn divided_by_x(value: u32) -> u32 {
    match value & ONE {
        0 => value << 1,
        _ => (value ^ POLYNOMIAL) << 1 | 1,
    }
}

fn product(mut one: u32, mut other: u32) -> u32 {
    let mut sum = 0;
    while one != 0 {
        // Without branches: the bits are random.
        sum ^= other & 0u32.wrapping_sub(one >> 31);
        other = (other >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(other & 1));
        one <<= 1;
    }
    sum
}

/// Whether an ICRC that differs by `difference` from that for the identification 0 is right for
/// another one. `covered` is the number of bytes from the BTH up to the ICRC.
pub(super) fn explains(difference: [u8; 4], covered: usize) -> bool {
    let bytes = covered + AFTER_IDENTIFICATION;
    let Some(coarse) = COARSE.get(bytes >> FINE_BITS) else {
        return false;
    };
    let fine = FINE[bytes & (FINE.len() - 1)];
    product(product(u32::from_le_bytes(difference), *coarse), fine) << 16 == 0
}
