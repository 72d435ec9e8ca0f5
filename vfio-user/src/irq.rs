//! Interrupts.

use crate::error::Malformed;
use crate::fields::{Fields, Put};
use bitflags::bitflags;

bitflags! {
    /// What a kind of interrupt can (`VFIO_IRQ_INFO_*`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct IrqFlags: u32 {
        /// It is told by an eventfd.
        const EVENTFD = 1;
        /// It can be masked and unmasked by message.
        const MASKABLE = 2;
        /// It masks itself when raised.
        const AUTOMASKED = 4;
        /// All vectors must be set up at once.
        const NORESIZE = 8;
        const _ = !0;
    }
}

/// Answer to [`Request::IrqInfo`](crate::Request::IrqInfo).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IrqInfo {
    /// What it can.
    pub flags: IrqFlags,
    /// Which kind: one of [`irq_index`](crate::irq_index).
    pub index: u32,
    /// Number of vectors.
    pub count: u32,
}

impl IrqInfo {
    /// Length of the payload in bytes.
    pub const LEN: u32 = 16;

    pub(crate) fn parse(mut fields: Fields<'_>) -> Result<IrqInfo, Malformed> {
        fields.u32()?;
        Ok(IrqInfo {
            flags: IrqFlags::from_bits_retain(fields.u32()?),
            index: fields.u32()?,
            count: fields.u32()?,
        })
    }

    pub(crate) fn emit(&self, out: &mut Vec<u8>) {
        out.put32(IrqInfo::LEN);
        out.put32(self.flags.bits());
        out.put32(self.index);
        out.put32(self.count);
    }
}

const DATA_NONE: u32 = 1;
const DATA_BOOL: u32 = 2;
const DATA_EVENTFD: u32 = 4;
const DATA: u32 = DATA_NONE | DATA_BOOL | DATA_EVENTFD;
const MASK: u32 = 8;
const UNMASK: u32 = 16;
const TRIGGER: u32 = 32;
const ACTION: u32 = MASK | UNMASK | TRIGGER;

/// What a [`SetIrqs`] is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IrqAction {
    /// Interrupts being masked.
    Mask,
    /// Interrupts being unmasked.
    Unmask,
    /// Interrupts being raised.
    Trigger,
}

/// How the vectors of a [`SetIrqs`] are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IrqData<'a> {
    /// All of the range: do it now. With a count of 0, turn the whole index off.
    None,
    /// Those of the range whose byte is not 0: do it now.
    Bool(&'a [u8]),
    /// Whenever it happens, tell the eventfd that came with the message; without one, tell nobody
    /// any more.
    Eventfd,
}

/// What shall be done about a range of vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SetIrqs<'a> {
    /// Which kind: one of [`irq_index`](crate::irq_index).
    pub index: u32,
    /// The first vector.
    pub start: u32,
    /// Number of vectors.
    pub count: u32,
    /// What about them.
    pub action: IrqAction,
    /// Which of them, and how.
    pub data: IrqData<'a>,
}

impl<'a> SetIrqs<'a> {
    /// Length of the payload without data in bytes.
    pub const LEN: u32 = 20;

    pub(crate) fn parse(mut fields: Fields<'a>) -> Result<SetIrqs<'a>, Malformed> {
        if fields.u32()? < SetIrqs::LEN {
            return Err(Malformed::Argsz);
        }
        let flags = fields.u32()?;
        let (index, start, count) = (fields.u32()?, fields.u32()?, fields.u32()?);
        let action = match flags & ACTION {
            MASK => IrqAction::Mask,
            UNMASK => IrqAction::Unmask,
            TRIGGER => IrqAction::Trigger,
            _ => return Err(Malformed::Flags(flags)),
        };
        let data = match flags & DATA {
            DATA_NONE => IrqData::None,
            DATA_BOOL => IrqData::Bool(fields.bytes(count as usize)?),
            DATA_EVENTFD => IrqData::Eventfd,
            _ => return Err(Malformed::Flags(flags)),
        };
        if flags & !(ACTION | DATA) != 0 {
            return Err(Malformed::Flags(flags));
        }
        Ok(SetIrqs {
            index,
            start,
            count,
            action,
            data,
        })
    }

    pub(crate) fn emit(&self, out: &mut Vec<u8>) {
        let action = match self.action {
            IrqAction::Mask => MASK,
            IrqAction::Unmask => UNMASK,
            IrqAction::Trigger => TRIGGER,
        };
        let (data, bools): (u32, &[u8]) = match self.data {
            IrqData::None => (DATA_NONE, &[]),
            IrqData::Bool(bools) => (DATA_BOOL, bools),
            IrqData::Eventfd => (DATA_EVENTFD, &[]),
        };
        out.put32(SetIrqs::LEN + bools.len() as u32);
        out.put32(action | data);
        out.put32(self.index);
        out.put32(self.start);
        out.put32(self.count);
        out.extend_from_slice(bools);
    }
}
