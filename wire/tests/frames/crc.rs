use hex_literal::hex;
use urnic_wire::crc::crc32c;

/// The examples of RFC 3720 appendix B.4, as printed there, and the common check value.
#[test]
fn mpa_c_02_crc32c_is_sent_least_significant_byte_first() {
    let ascending: [u8; 32] = core::array::from_fn(|i| i as u8);
    let descending: [u8; 32] = core::array::from_fn(|i| 31 - i as u8);
    let read_10 = hex!(
        "01c00000 00000000 00000000 00000000 14000000 00000400"
        "00000014 00000018 28000000 00000000 02000000 00000000"
    );
    let examples: [(&[u8], u32, [u8; 4]); 6] = [
        (&[0; 32], 0x8a91_36aa, hex!("aa36918a")),
        (&[0xff; 32], 0x62a8_ab43, hex!("43aba862")),
        (&ascending, 0x46dd_794e, hex!("4e79dd46")),
        (&descending, 0x113f_db5c, hex!("5cdb3f11")),
        (&read_10, 0xd996_3a56, hex!("563a96d9")),
        (b"123456789", 0xe306_9283, hex!("839206e3")),
    ];
    for (bytes, value, wire) in examples {
        assert_eq!(crc32c(bytes), value);
        assert_eq!(crc32c(bytes).to_le_bytes(), wire);
    }
}

#[test]
fn crc32c_of_no_bytes_is_zero() {
    assert_eq!(crc32c(&[]), 0);
}
