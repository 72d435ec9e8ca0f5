use crate::vectors::vector;
use hex_literal::hex;
use urnic_wire::mpa::startup::*;

fn header(bytes: [u8; HEADER_LEN]) -> Result<StartupHeader, StartupError> {
    StartupHeader::parse(&bytes)
}

/// A Request with these flags, revision and PD_Length.
fn request(flags: u8, revision: u8, pd_length: u16) -> [u8; HEADER_LEN] {
    let [high, low] = pd_length.to_be_bytes();
    let mut bytes = [0; HEADER_LEN];
    bytes[..16].copy_from_slice(b"MPA ID Req Frame");
    bytes[16..].copy_from_slice(&[flags, revision, high, low]);
    bytes
}

#[test]
fn mpa_s_04_another_key_is_no_startup_frame() {
    let get = *b"GET / HTTP/1.1\r\nHost";
    assert_eq!(header(get), Err(StartupError::Key(*b"GET / HTTP/1.1\r\n")));
    assert_eq!(
        header(get).unwrap_err().to_string(),
        "not an MPA start-up frame: key is \"GET / HTTP/1.1\\r\\n\""
    );
    let mut almost = request(0x40, 1, 0);
    almost[15] = b'E';
    assert!(matches!(header(almost), Err(StartupError::Key(_))));
}

#[test]
fn mpa_s_05_request_where_a_reply_is_due() {
    let found = header(request(0x40, 1, 0))
        .unwrap()
        .require(FrameKind::Reply, 1..=2);
    assert_eq!(
        found,
        Err(StartupError::Kind {
            expected: FrameKind::Reply,
            found: FrameKind::Request
        })
    );
    assert_eq!(
        found.unwrap_err().to_string(),
        "MPA Request frame where a Reply frame was due"
    );
}

#[test]
fn mpa_s_06_a_truncated_frame_reports_the_needed_length() {
    let bytes = vector("MPA-REQ-R2-PD");
    for have in 0..bytes.len() {
        let needed = if have < HEADER_LEN {
            HEADER_LEN
        } else {
            bytes.len()
        };
        let found = StartupFrame::parse(&bytes[..have]);
        assert_eq!(found, Err(StartupError::Truncated { needed, have }));
    }
    let header = StartupHeader::parse(bytes.first_chunk().unwrap()).unwrap();
    for wrong in [&bytes[20..27], &[0; 9]] {
        assert!(matches!(
            StartupFrame::from_parts(header, wrong),
            Err(StartupError::Truncated { needed: 28, .. })
        ));
    }
}

#[test]
fn mpa_s_07_s_08_reject_and_reserved_bits_are_harmless() {
    let flags = header(request(0x2f, 1, 0)).unwrap().flags;
    assert_eq!(
        flags,
        StartupFlags {
            reject: true,
            ..StartupFlags::default()
        }
    );

    let bytes = vector("MPA-REQ-R1");
    let (frame, _) = StartupFrame::parse(&bytes).unwrap();
    let mut buffer = [0xff; MAX_FRAME_LEN];
    frame.emit(&mut buffer).unwrap();
    assert_eq!(buffer[16], 0x40, "reserved bits go out as zero");
}

#[test]
fn mpa_s_09_other_revisions_are_refused_by_name() {
    for revision in [3, 129, 255] {
        let found = header(request(0x40, revision, 0))
            .unwrap()
            .require(FrameKind::Request, 1..=2);
        assert_eq!(found, Err(StartupError::Revision(revision)));
    }
    for revision in [1, 2] {
        assert!(
            header(request(0x40, revision, 0))
                .unwrap()
                .require(FrameKind::Request, 1..=2)
                .is_ok()
        );
    }
}

#[test]
fn mpa_s_10_private_data_ends_at_512() {
    assert_eq!(header(request(0x40, 1, 512)).unwrap().private_data_len, 512);
    assert_eq!(header(request(0x40, 1, 513)), Err(StartupError::PrivateData(513)));
    assert_eq!(
        header(request(0x40, 1, 0xffff)),
        Err(StartupError::PrivateData(0xffff))
    );

    let data = [7; 513];
    let frame = |word, len| StartupFrame {
        kind: FrameKind::Request,
        flags: StartupFlags::default(),
        revision: 2,
        word,
        private_data: &data[..len],
    };
    let mut buffer = [0; MAX_FRAME_LEN];
    assert_eq!(frame(None, 512).emit(&mut buffer), Ok(532));
    assert_eq!(
        frame(None, 513).emit(&mut buffer),
        Err(StartupError::PrivateData(513))
    );
    // EMPA-04: the word counts.
    assert_eq!(
        frame(Some(EnhancedWord::default()), 508).emit(&mut buffer),
        Ok(532)
    );
    assert_eq!(
        frame(Some(EnhancedWord::default()), 509).emit(&mut buffer),
        Err(StartupError::PrivateData(513))
    );
}

#[test]
fn mpa_s_15_bytes_after_a_frame_are_returned() {
    let bytes = [vector("MPA-REP-R1-REJ"), b"rest".to_vec()].concat();
    assert_eq!(StartupFrame::parse(&bytes).unwrap().1, b"rest");
}

#[test]
fn empa_01_a_word_sets_s() {
    let frame = StartupFrame {
        kind: FrameKind::Request,
        flags: StartupFlags {
            crc: true,
            ..StartupFlags::default()
        },
        revision: 2,
        word: Some(EnhancedWord::default()),
        private_data: b"",
    };
    let mut buffer = [0; MAX_FRAME_LEN];
    frame.emit(&mut buffer).unwrap();
    assert_eq!(buffer[16], 0x50);
}

#[test]
fn empa_08_s_without_room_for_the_word_is_malformed() {
    for pd_length in 0..4 {
        let mut bytes = request(0x50, 2, pd_length).to_vec();
        bytes.resize(HEADER_LEN + usize::from(pd_length), 0);
        assert_eq!(
            StartupFrame::parse(&bytes),
            Err(StartupError::NoWord(pd_length.into()))
        );
    }
}

#[test]
fn empa_09_s_means_a_word_in_revision_2_only() {
    let data = hex!("8010c008");
    let parse = |flags, revision| {
        let bytes = [&request(flags, revision, 4)[..], &data].concat();
        let (frame, _) = StartupFrame::parse(&bytes).unwrap();
        (frame.word, frame.private_data.len(), frame.flags.enhanced)
    };
    assert_eq!(parse(0x50, 1), (None, 4, true));
    assert_eq!(parse(0x40, 2), (None, 4, false));
    let (word, ulp, enhanced) = parse(0x50, 2);
    assert_eq!(
        (word.map(EnhancedWord::to_bytes), ulp, enhanced),
        (Some(data), 0, true)
    );
}

#[test]
fn empa_39_a_depth_beyond_14_bits_is_sent_as_the_greatest() {
    let word = |ird, ord| {
        EnhancedWord {
            ird,
            ord,
            ..EnhancedWord::default()
        }
        .to_bytes()
    };
    assert_eq!(word(0x4000, 0xffff), hex!("3ffe3ffe"));
    assert_eq!(word(0x3fff, 0x3ffe), hex!("3fff3ffe"));
}

#[test]
fn every_bit_of_the_word_is_where_rfc_6581_has_it() {
    let none = EnhancedWord::default();
    for (bytes, word) in [
        (
            hex!("80000000"),
            EnhancedWord {
                peer_to_peer: true,
                ..none
            },
        ),
        (
            hex!("40000000"),
            EnhancedWord {
                rtr_send: true,
                ..none
            },
        ),
        (
            hex!("00008000"),
            EnhancedWord {
                rtr_write: true,
                ..none
            },
        ),
        (
            hex!("00004000"),
            EnhancedWord {
                rtr_read: true,
                ..none
            },
        ),
        (hex!("3fff0000"), EnhancedWord { ird: 0x3fff, ..none }),
        (hex!("00003fff"), EnhancedWord { ord: 0x3fff, ..none }),
    ] {
        assert_eq!((EnhancedWord::parse(bytes), word.to_bytes()), (word, bytes));
    }
}

#[test]
fn s001_04_either_spelling_is_an_rtr_frame() {
    for name in ["S001-RTR-hex", "S001-RTR-ascii"] {
        let header = StartupHeader::parse(vector(name).first_chunk().unwrap()).unwrap();
        assert!(
            header.require(FrameKind::Rtr(RtrKey::default()), 1..=1).is_ok(),
            "{name}"
        );
    }
    let reply = StartupHeader::parse(vector("S001-REP").first_chunk().unwrap()).unwrap();
    assert!(reply.require(FrameKind::Rtr(RtrKey::Hex), 1..=1).is_err());
    assert_eq!(RtrKey::default(), RtrKey::Hex);
}

/// C mirrored from the Reply, S and private data are all accepted in an RTR frame.
#[test]
fn s001_05_an_rtr_frame_has_no_word() {
    let mut bytes = [&vector("S001-RTR-hex")[..], b"....."].concat();
    (bytes[16], bytes[17], bytes[19]) = (0x50, 2, 5);
    let (frame, rest) = StartupFrame::parse(&bytes).unwrap();
    assert_eq!(
        (frame.word, frame.private_data, frame.flags.crc, rest),
        (None, &b"....."[..], true, &[][..])
    );
}

#[test]
fn mpa_s_10_a_private_data_length_mismatch_is_reported() {
    let header = header(request(0x40, 1, 8)).unwrap();
    for have in [0, 7, 9, 512] {
        let joined = StartupFrame::from_parts(header, &[0; 512][..have]);
        let (needed, have) = (20 + 8, 20 + have);
        assert_eq!(joined.unwrap_err(), StartupError::Truncated { needed, have });
    }
    assert_eq!(MAX_FRAME_LEN, 20 + 512);
}
