//! Information about the device.

use crate::error::Malformed;
use crate::fields::{Fields, Put};
use bitflags::bitflags;

bitflags! {
    /// Properties of a device (`VFIO_DEVICE_FLAGS_*`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct DeviceFlags: u32 {
        /// The device can be reset.
        const RESET = 1;
        /// The device is a PCI function.
        const PCI = 2;
        const _ = !0;
    }
}

/// Reply to [`Request::DeviceInfo`](crate::Request::DeviceInfo).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Properties of the device.
    pub flags: DeviceFlags,
    /// Number of regions.
    pub regions: u32,
    /// Number of kinds of interrupts.
    pub irqs: u32,
}

impl DeviceInfo {
    /// Length of the payload in bytes.
    pub const LEN: u32 = 16;

    pub(crate) fn parse(mut fields: Fields<'_>) -> Result<DeviceInfo, Malformed> {
        fields.u32()?;
        Ok(DeviceInfo {
            flags: DeviceFlags::from_bits_retain(fields.u32()?),
            regions: fields.u32()?,
            irqs: fields.u32()?,
        })
    }

    pub(crate) fn emit(&self, out: &mut Vec<u8>) {
        out.put32(DeviceInfo::LEN);
        out.put32(self.flags.bits());
        out.put32(self.regions);
        out.put32(self.irqs);
    }
}
