//! DDP Stream Session Control messages (RFC 5043 §5.2.3, RFC 6581 §7): the counterparts of MPA's
//! start-up frames, and the end of a session. They follow the [DDP-SSN](super::chunk::Ssn).
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |         Function Code         |A|B|            IRD            |  IRD and ORD only in
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+  Enhanced Initiate and
//! |C|D|            ORD            |  Private Data of the ULP      |  Enhanced Accept
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```
//!
//! No field has the length of the private data: it ends with the chunk.

use crate::mpa::startup::{EnhancedWord, WORD_LEN};
use core::fmt;

/// Bytes of the Function Code.
pub const FUNCTION_LEN: usize = 2;

/// Most bytes of private data, the IRD/ORD word included (RFC 5043 §5.2.3, RFC 6581 §7).
pub const MAX_PRIVATE_DATA: usize = 512;

/// Length in bytes of the longest message, without its DDP-SSN.
pub const MAX_MESSAGE_LEN: usize = FUNCTION_LEN + MAX_PRIVATE_DATA;

/// A fault of a session control message. It ends the session (RFC 5043 §6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// The chunk ends before the Function Code does.
    #[error("a DDP session control message of {0} bytes has no function code")]
    Truncated(usize),
    /// A Function Code that neither RFC defines.
    #[error("DDP session control function 0x{0:04x} is not defined")]
    Function(u16),
    /// More than [`MAX_PRIVATE_DATA`] bytes of private data.
    #[error("DDP session private data of {0} bytes exceeds {MAX_PRIVATE_DATA}")]
    PrivateData(usize),
    /// An enhanced message without room for its IRD/ORD word.
    #[error("an enhanced DDP session message has {0} bytes of private data, too few for its IRD/ORD word")]
    NoWord(usize),
    /// Private data in a Terminate, which must have none (RFC 5043 §5.2.3).
    #[error("a DDP session Terminate has {0} bytes of private data")]
    InTerminate(usize),
}

/// What a message does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// The active end requests a session.
    Initiate,
    /// The passive end accepts.
    Accept,
    /// The passive end's ULP rejects.
    Reject,
    /// Either end ends its direction of the session; the passive end also refuses so what its ULP
    /// has not seen (RFC 5043 §6.4).
    Terminate,
}

/// A session control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionMessage<'a> {
    /// What the message does.
    pub function: Function,
    /// The form of RFC 6581 §7; a Terminate has one form only.
    pub enhanced: bool,
    /// The IRD/ORD word, in an enhanced Initiate or Accept.
    pub word: Option<EnhancedWord>,
    /// The private data of the ULP, without the word.
    pub private_data: &'a [u8],
}

/// The Function Codes, with the function and whether it is the enhanced form.
const CODES: [(u16, Function, bool); 7] = [
    (1, Function::Initiate, false),
    (2, Function::Accept, false),
    (3, Function::Reject, false),
    (4, Function::Terminate, false),
    (5, Function::Initiate, true),
    (6, Function::Accept, true),
    (7, Function::Reject, true),
];

impl SessionMessage<'static> {
    /// The message that ends a session.
    pub const TERMINATE: Self = SessionMessage {
        function: Function::Terminate,
        enhanced: false,
        word: None,
        private_data: &[],
    };
}

impl<'a> SessionMessage<'a> {
    /// An Initiate or Accept: enhanced, if there is a word.
    pub const fn new(function: Function, word: Option<EnhancedWord>, private_data: &'a [u8]) -> Self {
        Self {
            function,
            enhanced: word.is_some(),
            word,
            private_data,
        }
    }

    /// A rejection, which has no word.
    pub const fn reject(enhanced: bool, private_data: &'a [u8]) -> Self {
        Self {
            function: Function::Reject,
            enhanced,
            word: None,
            private_data,
        }
    }

    /// Parses a whole message, which is the user data of a chunk after its DDP-SSN.
    ///
    /// # Errors
    /// Any [`SessionError`].
    pub fn parse(bytes: &'a [u8]) -> Result<Self, SessionError> {
        let (code, data) = bytes
            .split_first_chunk()
            .ok_or(SessionError::Truncated(bytes.len()))?;
        let code = u16::from_be_bytes(*code);
        let known = CODES.iter().find(|known| known.0 == code);
        let (_, function, enhanced) = *known.ok_or(SessionError::Function(code))?;
        if data.len() > MAX_PRIVATE_DATA {
            return Err(SessionError::PrivateData(data.len()));
        }
        if function == Function::Terminate && !data.is_empty() {
            return Err(SessionError::InTerminate(data.len()));
        }
        let (word, private_data) = if enhanced && function != Function::Reject {
            let (word, rest) = data
                .split_first_chunk::<WORD_LEN>()
                .ok_or(SessionError::NoWord(data.len()))?;
            (Some(EnhancedWord::parse(*word)), rest)
        } else {
            (None, data)
        };
        Ok(Self {
            function,
            enhanced,
            word,
            private_data,
        })
    }

    /// The Function Code.
    fn code(&self) -> u16 {
        let enhanced = self.enhanced && self.function != Function::Terminate;
        let known = CODES
            .iter()
            .find(|known| known.1 == self.function && known.2 == enhanced);
        known.map_or(0, |known| known.0)
    }

    /// Bytes of private data, with the word.
    const fn data_len(&self) -> usize {
        self.private_data.len() + if self.word.is_some() { WORD_LEN } else { 0 }
    }

    /// Length of the message in bytes.
    pub const fn buffer_len(&self) -> usize {
        FUNCTION_LEN + self.data_len()
    }

    /// Writes the message to the front of `buffer`; returns the number of bytes written.
    ///
    /// # Errors
    /// [`SessionError::PrivateData`] if word and private data exceed [`MAX_PRIVATE_DATA`].
    ///
    /// # Panics
    /// If `buffer` is shorter than [`Self::buffer_len`]; [`MAX_MESSAGE_LEN`] bytes always suffice.
    pub fn emit(&self, buffer: &mut [u8]) -> Result<usize, SessionError> {
        if self.data_len() > MAX_PRIVATE_DATA {
            return Err(SessionError::PrivateData(self.data_len()));
        }
        let (code, data) = buffer[..self.buffer_len()].split_at_mut(FUNCTION_LEN);
        code.copy_from_slice(&self.code().to_be_bytes());
        let (word, ulp) = data.split_at_mut(self.data_len() - self.private_data.len());
        if let Some(value) = self.word {
            word.copy_from_slice(&value.to_bytes());
        }
        ulp.copy_from_slice(self.private_data);
        Ok(self.buffer_len())
    }
}

impl fmt::Display for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Initiate => "Initiate",
            Self::Accept => "Accept",
            Self::Reject => "Reject",
            Self::Terminate => "Terminate",
        })
    }
}

impl fmt::Display for SessionMessage<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let enhanced = if self.enhanced { "Enhanced " } else { "" };
        write!(f, "DDP session {enhanced}{}", self.function)?;
        if let Some(word) = self.word {
            write!(f, " {word}")?;
        }
        if self.function == Function::Terminate {
            return Ok(());
        }
        write!(f, " private data {}", self.private_data.len())
    }
}
