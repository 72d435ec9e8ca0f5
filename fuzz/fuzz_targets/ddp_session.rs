//! Chunks of DDP over SCTP: a session control message that is accepted is emitted again unchanged,
//! and any parameters of an INIT may be searched for the adaptation indication.

#![no_main]

use libfuzzer_sys::fuzz_target;
use urnic_wire::mpa::startup::EnhancedWord;
use urnic_wire::sctp::adaptation::Adaptation;
use urnic_wire::sctp::chunk::Ssn;
use urnic_wire::sctp::session::{Function, MAX_MESSAGE_LEN, SessionMessage};

fn seeds() -> Vec<Vec<u8>> {
    let word = Some(EnhancedWord::default());
    let messages = [
        SessionMessage::new(Function::Initiate, None, b"data"),
        SessionMessage::new(Function::Accept, word, b"data"),
        SessionMessage::reject(true, b""),
        SessionMessage::TERMINATE,
    ];
    let chunk = |message: &SessionMessage<'_>| {
        let mut bytes = vec![0; message.buffer_len()];
        message.emit(&mut bytes).expect("it is short");
        [&Ssn(1).to_bytes()[..], &bytes].concat()
    };
    let parameters = Adaptation::Ddp.parameter().expect("a parameter");
    messages.iter().map(chunk).chain([parameters.to_vec()]).collect()
}

fuzz_target!(
    init: urnic_fuzz::plant(seeds()),
    |input: &[u8]| {
        let _ = Adaptation::of_parameters(input).to_string();
        let Some((_, message)) = Ssn::split(input) else {
            return;
        };
        match SessionMessage::parse(message) {
            Ok(parsed) => {
                let _ = parsed.to_string();
                let mut again = [0; MAX_MESSAGE_LEN];
                let len = parsed.emit(&mut again).expect("what was accepted can be sent");
                assert_eq!(again[..len], *message);
            }
            Err(error) => drop(error.to_string()),
        }
    }
);
