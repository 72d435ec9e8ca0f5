//! Upper Layer Bindings (RFC 8166 §6): which arguments and results of a program are DDP-eligible,
//! and how long its replies can get. The crate of a program has its bindings.
//!
//! A requester passes the call that it has encoded, without the item, to [`bound`], which returns
//! the place of the item and the memory that the reply needs. A responder passes received Read
//! chunks to [`check`] before it reads the arguments.

use crate::rpc::{CallHeader, MAX_REPLY_HEADER};
use crate::xdr::{UNIT, pad};

/// The binding of one version of one program.
pub trait Binding {
    /// Program and version.
    fn program(&self) -> (u32, u32);

    /// TCP port of the program over RDMA on iWARP. `None`: the program has no port of its own, and
    /// rpcbind returns the port.
    fn port(&self) -> Option<u16> {
        None
    }

    /// The offset in `arguments`, after the count, of the argument that may move by Read chunk.
    /// `arguments` must contain all bytes before this argument. `None`: the procedure has no such
    /// argument, or the arguments are invalid.
    fn argument(&self, _procedure: u32, _arguments: &[u8]) -> Option<usize> {
        None
    }

    /// Maximum bytes of the result that may move by Write chunk. `None`: the procedure has no such
    /// result.
    fn result(&self, _procedure: u32, _arguments: &[u8]) -> Option<u32> {
        None
    }

    /// Maximum bytes of all results without the one that may move by Write chunk. `None`: the
    /// protocol has no limit, so the caller must set one.
    fn max_results(&self, procedure: u32, arguments: &[u8]) -> Option<usize>;

    /// Whether a server may make this call to its client (RFC 8167). NULL is always permitted.
    fn backward(&self, _procedure: u32) -> bool {
        false
    }
}

/// Whether a server may make this call backward: [`Binding::backward`] permits it, or the program
/// has no binding in `bindings` and the call may go without chunks.
pub fn may_go_backward(bindings: &[&dyn Binding], call: &CallHeader) -> bool {
    const NULL: u32 = 0;
    let of_program = |binding: &&&dyn Binding| binding.program() == (call.program, call.version);
    call.procedure == NULL
        || (bindings.iter().find(of_program)).is_none_or(|binding| binding.backward(call.procedure))
}

/// The limits of one call by its binding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bound {
    /// Offset in the message of the argument that may go by Read chunk. It is the offset of an
    /// [`Item`](crate::engine::Item).
    pub argument: Option<usize>,
    /// Maximum bytes of the result that may come by Write chunk.
    pub result: Option<u32>,
    /// Maximum bytes of the rest of the reply message:
    /// [`Call::max_reply`](crate::engine::Call::max_reply).
    pub max_reply: Option<usize>,
}

/// The parts of this call and its reply that may go by chunk. Nothing may, and the length of the
/// reply is unknown, if the message is no call, if its program has no binding in `bindings` (RFC
/// 8166 §6 requires one), or if RPCSEC_GSS protects it.
pub fn bound(bindings: &[&dyn Binding], message: &[u8]) -> Bound {
    let Ok(header) = CallHeader::parse(message) else {
        return Bound::default();
    };
    let of_program = |binding: &&&dyn Binding| binding.program() == (header.program, header.version);
    let Some(binding) = bindings.iter().find(of_program).filter(|_| !header.protected) else {
        return Bound::default();
    };
    let (procedure, arguments) = (header.procedure, &message[header.len..]);
    Bound {
        argument: (binding.argument(procedure, arguments)).map(|offset| header.len + offset),
        result: binding.result(procedure, arguments),
        max_reply: (binding.max_results(procedure, arguments)).map(|len| MAX_REPLY_HEADER + len),
    }
}

/// A Read chunk has an item that may not go by chunk, or its length differs from the count of the
/// item. The responder answers with [`garbage_args`](crate::rpc::garbage_args).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a Read chunk at Position {0} does not fit the arguments")]
pub struct Misplaced(pub u32);

/// Checks that the program permits `items` to move by Read chunk. `items` has the Position and the
/// bytes of each Read chunk, and `message` is the rest of the call, without the chunks. A length
/// may include the padding (RFC 8166 §3.4.5.2).
///
/// # Errors
/// The first item that the program does not permit.
pub fn check(bindings: &[&dyn Binding], message: &[u8], items: &[(u32, u64)]) -> Result<(), Misplaced> {
    let [first, rest @ ..] = items else {
        return Ok(());
    };
    let misplaced = Misplaced(first.0);
    let offset = bound(bindings, message).argument.ok_or(misplaced)?;
    let count = message
        .get(..offset)
        .and_then(|before| before.last_chunk::<UNIT>());
    let count = u64::from(u32::from_be_bytes(*count.ok_or(misplaced)?));
    // No bytes are left out before the first item, so its Position is its offset.
    if first.0 as usize != offset || (first.1 != count && first.1 != count + pad(count)) {
        return Err(misplaced);
    }
    rest.first().map_or(Ok(()), |second| Err(Misplaced(second.0)))
}
