//! Stand-ins for a device, for tests.

pub(crate) mod fake_bus;
