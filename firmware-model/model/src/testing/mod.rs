//! What tests and fuzz targets have around the model: hosts and drivers in front of it, a network
//! and peers at its other end. Not part of the product.

#[cfg(fuzzing)]
pub mod fuzzing;
#[cfg(any(test, fuzzing))]
pub(crate) mod mock;
#[cfg(any(test, fuzzing))]
pub(crate) mod rig;
pub mod sim;
