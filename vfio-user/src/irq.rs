//! Interrupts.

use crate::error::Malformed;
use crate::fields::{Fields, Put};
use bitflags::bitflags;

bitflags! {
    /// Properties of a kind of interrupts (`VFIO_IRQ_INFO_*`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct IrqFlags: u32 {
        /// The interrupt is signalled by an eventfd.
        const EVENTFD = 1;
        /// The interrupt can be masked and unmasked by message.
        const MASKABLE = 2;
        const _ = !0;
    }
}

/// Reply to [`Request::IrqInfo`](crate::Request::IrqInfo).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IrqInfo {
    /// Properties of the kind.
    pub flags: IrqFlags,
    /// Kind of interrupts: one of [`irq_index`](crate::irq_index).
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

/// The action of a [`SetIrqs`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IrqAction {
    /// Mask interrupts.
    Mask,
    /// Unmask interrupts.
    Unmask,
    /// Raise interrupts.
    Trigger,
}

/// How a [`SetIrqs`] selects vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IrqData<'a> {
    /// All vectors of the range, immediately. With a count of 0, disable the whole index.
    None,
    /// The vectors of the range whose byte is not 0, immediately.
    Bool(&'a [u8]),
    /// Signal the eventfd that came with the message at each later action; without an eventfd, end
    /// the signals.
    Eventfd,
}

/// An action on a range of vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SetIrqs<'a> {
    /// Kind of interrupts: one of [`irq_index`](crate::irq_index).
    pub index: u32,
    /// The first vector.
    pub start: u32,
    /// Number of vectors.
    pub count: u32,
    /// The action.
    pub action: IrqAction,
    /// The vectors of the range to which the action applies, and when.
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
