//! Interrupts: `VFIO_USER_DEVICE_GET_IRQ_INFO` and `VFIO_USER_DEVICE_SET_IRQS`.
//!
//! MSI-X has as many interrupts as the function has vectors. INTx has one if the function has a
//! pin. The error type and the device-request type have one each, which is routed but never
//! signalled. MSI has none.
//!
//! INTx is level-triggered. It is delivered once and then masked until the client unmasks it, by a
//! message or by the eventfd that the client gave for that. If it is asserted at that time, it is
//! delivered again.

use rustix::io::Errno;
use slipway_peer::Foreign;
use slipway_vfio_user_spec::{IrqInfo, IrqInfoFlags, IrqSet, IrqSetFlags as F, U32, irq};
use zerocopy::IntoBytes;

use super::{Answer, exactly, prefix};
use crate::device::Device;
use crate::interrupts::{Line, adopt};
use crate::stats::{Live, add};

/// Describes a type of interrupts.
pub(super) fn info(device: &Device, payload: &[u8]) -> Result<Answer, Errno> {
    let request: IrqInfo = exactly(payload)?;
    let size = size_of::<IrqInfo>() as u32;
    if request.argsz.get() < size {
        return Err(Errno::INVAL);
    }
    let lines = lines(device, request.index.get())?;
    let flags = match request.index.get() {
        _ if lines.is_empty() => IrqInfoFlags::empty(),
        irq::MSIX if device.hardware.is_some() => IrqInfoFlags::EVENTFD,
        irq::MSIX => IrqInfoFlags::EVENTFD | IrqInfoFlags::MASKABLE,
        irq::INTX => IrqInfoFlags::EVENTFD | IrqInfoFlags::MASKABLE | IrqInfoFlags::AUTOMASKED,
        _ => IrqInfoFlags::EVENTFD,
    };
    let reply = IrqInfo {
        argsz: U32::new(size),
        flags: U32::new(flags.bits()),
        index: request.index,
        count: U32::new(lines.len() as u32),
    };
    Ok(Answer::Reply(reply.as_bytes().to_vec()))
}

/// A request to set interrupts, whose flags are valid for the type of the interrupts.
struct SetRequest<'a> {
    index: u32,
    /// One flag of [`F::DATA`]: the kind of data that came.
    data: F,
    /// One flag of [`F::ACTION`].
    action: F,
    start: usize,
    count: usize,
    /// The bytes behind the request.
    booleans: &'a [u8],
}

impl<'a> SetRequest<'a> {
    fn parse(payload: &'a [u8]) -> Result<Self, Errno> {
        let (request, booleans): (IrqSet, _) = prefix(payload)?;
        let flags = F::from_bits(request.flags.get()).ok_or(Errno::INVAL)?;
        let (data, action) = (flags & F::DATA, flags & F::ACTION);
        let index = request.index.get();
        let is_maskable = matches!(index, irq::MSIX | irq::INTX);
        let is_valid = request.argsz.get() as usize >= size_of::<IrqSet>()
            && data.bits().count_ones() == 1
            && action.bits().count_ones() == 1
            && (is_maskable || action == F::TRIGGER);
        if !is_valid {
            return Err(Errno::INVAL);
        }
        let (start, count) = (request.start.get() as usize, request.count.get() as usize);
        Ok(Self { index, data, action, start, count, booleans })
    }

    /// Returns the interrupts among `all` that the request is about. The data that came must be
    /// what its kind of data needs for them.
    fn range<'l>(&self, all: &'l [Line], files: &[Foreign]) -> Result<&'l [Line], Errno> {
        let end = self.start.checked_add(self.count).ok_or(Errno::INVAL)?;
        let range = all.get(self.start..end).ok_or(Errno::INVAL)?;
        let booleans = if self.data == F::DATA_BOOL { self.count } else { 0 };
        let takes_files = self.data == F::DATA_EVENTFD;
        if self.booleans.len() != booleans || !(takes_files || files.is_empty()) {
            return Err(Errno::INVAL);
        }
        Ok(range)
    }
}

/// Routes, masks, unmasks or signals interrupts.
pub(super) fn set(
    device: &Device,
    payload: &[u8],
    files: Vec<Foreign>,
    live: &Live,
) -> Result<Answer, Errno> {
    let request = SetRequest::parse(payload)?;
    let all = lines(device, request.index)?;
    if device.hardware.is_some() && request.index == irq::MSIX && request.action != F::TRIGGER {
        // Its messages do not come by here, where they could be held back.
        return Err(Errno::NOTSUP);
    }
    if request.count == 0 {
        return tear_down(device, &request, all, &files);
    }
    let range = request.range(all, &files)?;
    if request.data == F::DATA_EVENTFD {
        return set_eventfds(device, &request, range, files, live);
    }
    for (position, line) in range.iter().enumerate() {
        if request.booleans.get(position).is_none_or(|wanted| *wanted != 0) {
            act(line, request.action);
        }
    }
    Ok(Answer::Reply(Vec::new()))
}

/// Routes interrupts to eventfds, or takes the eventfd by which the client unmasks the pin.
fn set_eventfds(
    device: &Device,
    request: &SetRequest<'_>,
    range: &[Line],
    files: Vec<Foreign>,
    live: &Live,
) -> Result<Answer, Errno> {
    match (request.index, request.action) {
        (_, F::TRIGGER) => route(range, files, live),
        (irq::INTX, F::UNMASK) => {
            device.note_unmasking();
            route(std::slice::from_ref(&device.unmasking), files, live)
        }
        // The server masks nothing by itself, so it has nothing to report to an eventfd.
        _ => Err(Errno::NOTSUP),
    }
}

/// Passes a request that was carried out here on to the hardware, if there is any.
pub(super) fn pass_on(device: &mut Device, payload: &[u8]) -> Result<(), Errno> {
    let (request, _): (IrqSet, _) = prefix(payload)?;
    let flags = F::from_bits_truncate(request.flags.get());
    let (index, is_route) = (request.index.get(), flags.contains(F::DATA_EVENTFD));
    if flags.contains(F::TRIGGER) {
        // Otherwise the client tries its own eventfds.
        let changes = is_route || request.count.get() == 0;
        return if changes { device.pass_routes(index) } else { Ok(()) };
    }
    // The eventfd that unmasks the pin is watched by the endpoint.
    if index == irq::INTX && !is_route { device.pass_mask() } else { Ok(()) }
}

/// Returns whether a request is about MSI-X. Only MSI-X shows that a guest runs: VMMs route the
/// other types before.
pub(super) fn is_msix(payload: &[u8]) -> bool {
    prefix::<IrqSet>(payload).is_ok_and(|(request, _)| request.index.get() == irq::MSIX)
}

/// Returns the interrupts of type `index`.
fn lines(device: &Device, index: u32) -> Result<&[Line], Errno> {
    match index {
        irq::INTX if device.has_pin => Ok(std::slice::from_ref(&device.sink.pin)),
        irq::INTX | irq::MSI => Ok(&[]),
        irq::MSIX => Ok(device.sink.lines()),
        irq::ERR => Ok(std::slice::from_ref(&device.error)),
        irq::REQ => Ok(std::slice::from_ref(&device.request)),
        _ => Err(Errno::INVAL),
    }
}

/// "A count (and start) of 0, with data flags of DATA_NONE disables all interrupts of the index."
fn tear_down(
    device: &Device,
    request: &SetRequest<'_>,
    all: &[Line],
    files: &[Foreign],
) -> Result<Answer, Errno> {
    let is_bare = request.start == 0 && request.booleans.is_empty() && files.is_empty();
    if !is_bare || (request.data, request.action) != (F::DATA_NONE, F::TRIGGER) {
        return Err(Errno::INVAL);
    }
    all.iter().for_each(Line::clear);
    if request.index == irq::INTX {
        device.unmasking.clear();
        device.note_unmasking();
    }
    Ok(Answer::Reply(Vec::new()))
}

/// Routes a range of interrupts, or removes their routes if no descriptor came.
fn route(range: &[Line], files: Vec<Foreign>, live: &Live) -> Result<Answer, Errno> {
    if files.is_empty() {
        range.iter().for_each(|line| line.route(None));
        return Ok(Answer::Reply(Vec::new()));
    }
    if files.len() != range.len() {
        return Err(Errno::INVAL);
    }
    // A descriptor that is no eventfd is found before any route changes.
    let adopted: Option<Vec<_>> = files.into_iter().map(adopt).collect();
    let Some(adopted) = adopted else {
        add(&live.refused_files, 1);
        return Err(Errno::INVAL);
    };
    for (line, file) in range.iter().zip(adopted) {
        line.route(Some(file));
    }
    Ok(Answer::Reply(Vec::new()))
}

fn act(line: &Line, action: F) {
    match action {
        F::MASK => line.mask(),
        F::UNMASK => line.unmask(),
        _ => line.signal(),
    }
}
