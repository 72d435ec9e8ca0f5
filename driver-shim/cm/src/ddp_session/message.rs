//! The bytes of messages to send.

use urnic_wire::sctp::session::{MAX_MESSAGE_LEN, SessionMessage};

use crate::mpa_startup::PrivateDataTooLong;

/// The bytes of a message.
pub(super) fn bytes_of(message: &SessionMessage<'_>) -> Result<Vec<u8>, PrivateDataTooLong> {
    let mut bytes = vec![0; message.buffer_len().min(MAX_MESSAGE_LEN)];
    message
        .emit(&mut bytes)
        .map_err(|_| PrivateDataTooLong(message.private_data.len()))?;
    Ok(bytes)
}

/// The bytes of the message that ends a session.
pub(super) fn terminate() -> Vec<u8> {
    bytes_of(&SessionMessage::TERMINATE).unwrap_or_default()
}
