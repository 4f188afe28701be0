//! Requests that stop a function and move its state: `VFIO_USER_DEVICE_FEATURE`,
//! `VFIO_USER_MIG_DATA_READ`, `VFIO_USER_MIG_DATA_WRITE`. And those that log its writes to RAM.

use slipway_vfio_user_spec as spec;
use slipway_vfio_user_wire::MAX_DATA_XFER_SIZE;
use spec::{Command, U32, U64, device_state, feature};
use zerocopy::{FromBytes, IntoBytes};

use crate::{Client, ClientError};

/// The largest saved state in bytes that a client takes from a server: 16 MiB.
pub const MAX_STATE: usize = 16 << 20;
/// Bytes of a page of a log.
pub(crate) const PAGE: u64 = 4096;
/// The most bytes of bits in a report: the servers of this repository give no more.
const MOST_BITS: usize = 64 << 10;

impl Client {
    /// Returns the state of the function (`slipway_vfio_user_spec::device_state`).
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn device_state(&mut self) -> Result<u32, ClientError> {
        self.device_state_feature(feature::GET, device_state::ERROR)
    }

    /// Changes the state of the function (`slipway_vfio_user_spec::device_state`), and waits until
    /// it has changed.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn set_device_state(&mut self, state: u32) -> Result<(), ClientError> {
        self.device_state_feature(feature::SET, state).map(drop)
    }

    /// Reads the state of a function in STOP_COPY, to its end.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Malformed`] if the state is longer than [`MAX_STATE`].
    pub fn read_state(&mut self) -> Result<Vec<u8>, ClientError> {
        let mut state = Vec::new();
        loop {
            let part = self.read_state_part(self.chunk())?;
            state.extend_from_slice(&part);
            if state.len() > MAX_STATE {
                return Err(ClientError::Malformed("a state that is too long"));
            }
            if part.len() < self.chunk() {
                return Ok(state);
            }
        }
    }

    /// Reads the next `len` bytes of the state of a function in STOP_COPY. Fewer bytes are the last
    /// ones.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn read_state_part(&mut self, len: usize) -> Result<Vec<u8>, ClientError> {
        let request = spec::MigrationData::request(len);
        let reply = self.call(Command::MigDataRead, request.as_bytes(), &[])?;
        let parsed = spec::MigrationData::read_from_prefix(&reply.payload);
        let (header, data) = parsed.map_err(|_| ClientError::Malformed("migration data"))?;
        if header.size.get() as usize != data.len() || data.len() > len {
            return Err(ClientError::Malformed("length of migration data"));
        }
        Ok(data.to_vec())
    }

    /// Gives a function in RESUMING the next bytes of its state, all of them.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn write_state(&mut self, state: &[u8]) -> Result<(), ClientError> {
        for part in state.chunks(self.chunk()) {
            let request = [spec::MigrationData::request(part.len()).as_bytes(), part].concat();
            self.call(Command::MigDataWrite, &request, &[])?;
        }
        Ok(())
    }

    /// Has the function note the pages of 4 KiB that it writes to, of all memory that is mapped. A
    /// log that there is begins anew.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Refused`] with `EOPNOTSUPP` by a server that has no log.
    pub fn start_log(&mut self) -> Result<(), ClientError> {
        let control = spec::LogControl { page_size: U64::new(PAGE), ..Default::default() };
        let data = control.as_bytes();
        self.feature(feature::SET | feature::LOG_START, data, data.len()).map(drop)
    }

    /// Ends the log.
    ///
    /// # Errors
    /// As for [`Client::start_log`].
    pub fn stop_log(&mut self) -> Result<(), ClientError> {
        self.feature(feature::SET | feature::LOG_STOP, &[], 0).map(drop)
    }

    /// Returns the most pages of one report, a multiple of 64.
    pub(crate) fn most_reported(&self) -> usize {
        (self.chunk().min(MOST_BITS) / 8).max(1) * 64
    }

    /// Returns a bit for each of `pages` pages from `iova` on that is set if the function has
    /// written to the page since it was last reported: the first page's is the lowest of the first
    /// word. The first page is a multiple of 64 pages behind the start of a region of memory, and
    /// the number of pages, at most [`Client::most_reported`], is a multiple of 64 or reaches to
    /// the region's end.
    ///
    /// # Errors
    /// As for [`Client::start_log`]; [`ClientError::Refused`] with `EINVAL` if there is no log.
    pub(crate) fn report_log(&mut self, iova: u64, pages: usize) -> Result<Vec<u64>, ClientError> {
        let (iova, length) = (U64::new(iova), U64::new(pages as u64 * PAGE));
        let range = spec::LogReport { iova, length, page_size: U64::new(PAGE) };
        let len = size_of::<spec::LogReport>() + pages.div_ceil(64) * 8;
        let flags = feature::GET | feature::LOG_REPORT;
        let data = self.feature(flags, range.as_bytes(), len)?;
        let bits = data.get(size_of::<spec::LogReport>()..).filter(|_| data.len() == len);
        let (words, _) = bits.ok_or(ClientError::Malformed("bits of a log"))?.as_chunks::<8>();
        Ok(words.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }

    /// Returns the number of bytes of state that go into one message, at least 1.
    fn chunk(&self) -> usize {
        let theirs = self.server.max_data_xfer_size.unwrap_or(spec::DEFAULT_MAX_DATA_XFER_SIZE);
        usize::try_from(theirs).unwrap_or(MAX_DATA_XFER_SIZE).clamp(1, MAX_DATA_XFER_SIZE)
    }

    fn device_state_feature(&mut self, operation: u32, state: u32) -> Result<u32, ClientError> {
        let state = spec::DeviceState { state: U32::new(state), ..Default::default() };
        let flags = operation | feature::DEVICE_STATE;
        let data = self.feature(flags, state.as_bytes(), size_of::<spec::DeviceState>())?;
        let state = spec::DeviceState::read_from_bytes(&data);
        Ok(state.map_err(|_| ClientError::Malformed("device state"))?.state.get())
    }

    /// Gets or sets a feature. Returns its data, of which the reply has at most `room` bytes.
    fn feature(&mut self, flags: u32, data: &[u8], room: usize) -> Result<Vec<u8>, ClientError> {
        let head = spec::DeviceFeature::request(flags, room);
        let request = [head.as_bytes(), data].concat();
        let reply = self.call(Command::DeviceFeature, &request, &[])?;
        let data = reply.payload.get(size_of::<spec::DeviceFeature>()..);
        Ok(data.ok_or(ClientError::Malformed("device feature"))?.to_vec())
    }
}
