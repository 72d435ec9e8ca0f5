//! What queue pairs do with the rest of the device: [`run`]s, streams and their ends ([`life`]), peers on the same device
//! ([`siblings`]), and who is to run next ([`kick`]). All of it is for whoever has a [`Core`](crate::state::Core) at hand.

mod kick;
mod life;
mod run;
mod siblings;
