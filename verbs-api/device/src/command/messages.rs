//! Commands and completions with their typed arguments and results.

use super::{
    Command, Completion, CreateCq, CreateEq, CreateMr, CreateMw, CreateQp, CreateSrq, Handle, ModerateCq,
    ModifyMr, ModifyQp, ModifySrq, Opcode, PAYLOAD_LEN, RESULT_LEN, ResizeCq, Status,
};
use crate::stream::{Attach, BindDatagrams, Close, Connect, Listen, Multicast, Path, Retries};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

impl Command {
    /// A command with these arguments, without buffers and with tag 0.
    pub fn new<T: IntoBytes + Immutable>(opcode: Opcode, arguments: &T) -> Command {
        const { assert!(size_of::<T>() <= PAYLOAD_LEN) };
        let mut command = Command::new_zeroed();
        command.opcode = (opcode as u16).into();
        command.payload[..size_of::<T>()].copy_from_slice(arguments.as_bytes());
        command
    }

    /// The arguments as a `T`.
    pub fn arguments<T: FromBytes>(&self) -> T {
        const { assert!(size_of::<T>() <= PAYLOAD_LEN) };
        T::read_from_prefix(&self.payload).map_or_else(|_| T::new_zeroed(), |(t, _)| t)
    }
}

impl Completion {
    /// A completion with this result.
    pub fn new<T: IntoBytes + Immutable>(tag: u16, status: Status, result: &T) -> Completion {
        const { assert!(size_of::<T>() <= RESULT_LEN) };
        let mut completion = Completion::new_zeroed();
        completion.tag = tag.into();
        completion.status = (status as u16).into();
        completion.payload[..size_of::<T>()].copy_from_slice(result.as_bytes());
        completion
    }

    /// The results as a `T`.
    pub fn result<T: FromBytes>(&self) -> T {
        const { assert!(size_of::<T>() <= RESULT_LEN) };
        T::read_from_prefix(&self.payload).map_or_else(|_| T::new_zeroed(), |(t, _)| t)
    }
}

impl Opcode {
    /// The fields of the command's arguments, with their offsets.
    pub const fn arguments(self) -> &'static [(&'static str, usize)] {
        match self {
            Opcode::CreateEq => CreateEq::FIELDS,
            Opcode::CreateMr => CreateMr::FIELDS,
            Opcode::ModifyMr => ModifyMr::FIELDS,
            Opcode::CreateMw => CreateMw::FIELDS,
            Opcode::CreateCq => CreateCq::FIELDS,
            Opcode::ResizeCq => ResizeCq::FIELDS,
            Opcode::ModerateCq => ModerateCq::FIELDS,
            Opcode::CreateSrq => CreateSrq::FIELDS,
            Opcode::ModifySrq => ModifySrq::FIELDS,
            Opcode::CreateQp => CreateQp::FIELDS,
            Opcode::ModifyQp => ModifyQp::FIELDS,
            Opcode::StreamConnect => Connect::FIELDS,
            Opcode::StreamListen => Listen::FIELDS,
            Opcode::StreamAttach | Opcode::LoopbackAttach => Attach::FIELDS,
            Opcode::StreamClose => Close::FIELDS,
            Opcode::BindDatagrams => BindDatagrams::FIELDS,
            Opcode::AttachMulticast | Opcode::DetachMulticast => Multicast::FIELDS,
            Opcode::ConnectPath => Path::FIELDS,
            Opcode::StartPath => Retries::FIELDS,
            Opcode::QueryDevice | Opcode::QueryAddresses | Opcode::AllocUar | Opcode::AllocPd => &[],
            Opcode::QueryCounters
            | Opcode::FreeUar
            | Opcode::FreePd
            | Opcode::DestroyEq
            | Opcode::DestroyMr
            | Opcode::DestroyMw
            | Opcode::DestroyCq
            | Opcode::DestroySrq
            | Opcode::QueryQp
            | Opcode::DestroyQp
            | Opcode::StreamUnlisten
            | Opcode::StreamSend
            | Opcode::StreamReceive
            | Opcode::StreamQuery
            | Opcode::CloseDatagrams => Handle::FIELDS,
        }
    }
}

impl Completion {
    /// The argument that the device refused in a command of this opcode, if it says which.
    pub fn argument_of(&self, opcode: Opcode) -> Option<&'static str> {
        let offset = (self.argument.get() as usize).checked_sub(1)?;
        let mut fields = opcode.arguments().iter().rev();
        fields.find(|(_, at)| *at <= offset).map(|(name, _)| *name)
    }
}
