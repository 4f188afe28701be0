//! Templates on recorded hosts and on some made by hand: guests of hosts of a kind see the same,
//! and never a feature that their host's KVM does not offer.
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do

use slipway_machine::{Error, Host, Leaf, Level, Template, speculation};

const EPYC: &str = include_str!("hosts/epyc.txt");
const ROME: &str = include_str!("hosts/epyc-rome.txt");
const MILAN: &str = include_str!("hosts/epyc-milan.txt");
const GENOA: &str = include_str!("hosts/amd-genoa.txt");
const BROADWELL: &str = include_str!("hosts/intel-broadwell.txt");
const SAPPHIRE_RAPIDS: &str = include_str!("hosts/intel-sapphire-rapids.txt");
const SOFTWARE_KVM: &str = include_str!("hosts/software-kvm.txt");

const V2: Template = Template::Level(Level::V2);
const V3: Template = Template::Level(Level::V3);
const V4: Template = Template::Level(Level::V4);

/// All that the hosts can give.
const GIVEN: [(&str, &[Template]); 7] = [
    (EPYC, &[V2, V3]),
    (ROME, &[V2, V3]),
    (MILAN, &[V2, V3]),
    (GENOA, &[V2, V3, V4]),
    (BROADWELL, &[V2, V3]),
    (SAPPHIRE_RAPIDS, &[V2, V3, V4]),
    (SOFTWARE_KVM, &[]),
];

fn host(text: &str) -> Host {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let leaves = lines.map(|line| {
        let words = line.split(' ').map(|word| u32::from_str_radix(word, 16).unwrap());
        let [function, index, eax, ebx, ecx, edx] = words.collect::<Vec<_>>().try_into().unwrap();
        Leaf { index, ..Leaf::new(function, [eax, ebx, ecx, edx]) }
    });
    Host { leaves: leaves.collect(), deadline_timer: true, ..Host::default() }
}

fn guest(host: &Host, template: Template) -> Vec<Leaf> {
    host.cpu(template, 1, 4).unwrap()
}

/// The words of feature bits, and the bits in them that describe the machine: several CPUs, the
/// deadline timer, a hypervisor, and the leaves of topology. KVM has no say in them.
const WORDS: [(u32, u32, usize, u32); 15] = [
    (1, 0, 2, 1 << 24 | 1 << 31),
    (1, 0, 3, 1 << 28),
    (6, 0, 0, 0),
    (7, 0, 1, 0),
    (7, 0, 2, 0),
    (7, 0, 3, 0),
    (7, 2, 3, 0),
    (0x0d, 0, 0, 0),
    (0x0d, 1, 0, 0),
    (0x8000_0001, 0, 2, 1 << 1 | 1 << 22),
    (0x8000_0001, 0, 3, 0),
    (0x8000_0008, 0, 1, 0),
    (0x8000_0021, 0, 0, 0),
    (0x8000_0021, 0, 2, 0),
    (0x4000_0001, 0, 0, 0),
];

/// Words of which the host decides some bits, and those bits.
const OF_HOST: [(u32, u32, usize, u32); 5] = [
    (7, 0, 3, 0x9c00_0600),
    (7, 2, 3, 0x3f),
    (0x8000_0008, 0, 1, 0x7f0f_d004),
    (0x8000_0021, 0, 0, 0x7800_0164),
    (0x8000_0021, 0, 2, 6),
];

fn place(leaves: &mut [Leaf], (function, index, at): (u32, u32, usize)) -> Option<&mut u32> {
    let mut all = leaves.iter_mut();
    let leaf = all.find(|leaf| (leaf.function, leaf.index) == (function, index))?;
    Some([&mut leaf.eax, &mut leaf.ebx, &mut leaf.ecx, &mut leaf.edx].into_iter().nth(at).unwrap())
}

fn word(leaves: &[Leaf], at: (u32, u32, usize)) -> u32 {
    place(&mut leaves.to_vec(), at).map_or(0, |word| *word)
}

/// Returns the leaves without what the host decides.
fn without_flaws(mut leaves: Vec<Leaf>) -> Vec<Leaf> {
    for (function, index, at, mask) in OF_HOST {
        if let Some(word) = place(&mut leaves, (function, index, at)) {
            *word &= !mask;
        }
    }
    leaves
}

#[test]
fn each_host_gives_what_it_has() {
    for (text, given) in GIVEN {
        let host = host(text);
        host.check(Template::Host).unwrap();
        for template in [V2, V3, V4] {
            let outcome = host.check(template);
            assert_eq!(
                outcome.is_ok(),
                given.contains(&template),
                "{text}\n{template}: {outcome:?}"
            );
        }
    }
}

#[test]
fn guests_of_a_kind_see_the_same() {
    let kinds = [[EPYC, ROME], [MILAN, GENOA], [BROADWELL, SAPPHIRE_RAPIDS]];
    for [one, other] in kinds {
        let hosts = [one, other].map(host);
        for template in [V2, V3] {
            let [one, other] = hosts.each_ref().map(|host| without_flaws(guest(host, template)));
            assert_eq!(one, other, "{template}");
        }
        // With the same microcode, all bytes are the same.
        let mut patched = hosts[1].clone();
        for (function, index, at, mask) in OF_HOST {
            let flaws = word(&hosts[0].leaves, (function, index, at)) & mask;
            let Some(own) = place(&mut patched.leaves, (function, index, at)) else {
                assert_eq!(flaws, 0);
                continue;
            };
            *own = *own & !mask | flaws;
        }
        for template in [V2, V3] {
            assert_eq!(guest(&hosts[0], template), guest(&patched, template), "{template}");
        }
    }
}

#[test]
fn other_kinds_differ() {
    let [zen, milan, intel] = [EPYC, MILAN, BROADWELL].map(|text| guest(&host(text), V3));
    assert_ne!(word(&zen, (1, 0, 0)), word(&milan, (1, 0, 0)));
    assert_ne!(word(&zen, (0, 0, 1)), word(&intel, (0, 0, 1)));
    assert_ne!(guest(&host(EPYC), V2), zen);
}

/// Checks that the guest has no feature that its host does not offer.
fn check_offered(host: &Host, template: Template) {
    let guest = guest(host, template);
    for (function, index, at, made) in WORDS {
        let [has, offered] = [&guest, &host.leaves].map(|all| word(all, (function, index, at)));
        let more = has & !offered & !made;
        assert_eq!(more, 0, "{template}: {function:#x}.{index} word {at} has {more:#x} more");
    }
}

#[test]
fn no_feature_appears_that_kvm_does_not_offer() {
    for (text, given) in GIVEN {
        let whole = host(text);
        check_offered(&whole, Template::Host);
        for template in given {
            check_offered(&whole, *template);
            for (function, index, at, _) in WORDS {
                for bit in 0..32 {
                    let mut less = whole.clone();
                    let Some(word) = place(&mut less.leaves, (function, index, at)) else { break };
                    *word &= !(1 << bit);
                    match less.check(*template) {
                        Ok(()) => check_offered(&less, *template),
                        Err(Error::Lacks { missing, .. }) => assert!(!missing.contains(',')),
                        Err(Error::Processor { reason, .. }) => {
                            assert!(reason.contains("component"), "{reason}");
                        }
                        Err(other) => panic!("{other}"),
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_missing_is_named() {
    let lacks = |host: &Host, template| match host.check(template) {
        Err(error @ Error::Lacks { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    let text = lacks(&host(MILAN), V4);
    let expected = "this host cannot give the CPU template x86-64-v4: its KVM does not offer \
                    avx512f, avx512dq, avx512cd, avx512bw, avx512vl, xsavec, xsaves; ";
    assert!(text.starts_with(expected), "{text}");
    assert!(lacks(&host(SOFTWARE_KVM), V2).contains("ssse3"));
    let late = Host { deadline_timer: false, ..host(EPYC) };
    assert!(lacks(&late, V2).contains("offer tsc_deadline_timer; "));
    let mut old = host(EPYC);
    *place(&mut old.leaves, (0x4000_0001, 0, 0)).unwrap() &= !(1 << 14);
    assert!(lacks(&old, V2).contains("offer kvm:async_pf_int; "));
    let mut small = host(EPYC);
    *place(&mut small.leaves, (0x8000_0008, 0, 0)).unwrap() = 0x3027;
    let text = small.check(V2).unwrap_err().to_string();
    assert!(text.ends_with("its physical addresses have 39 bits, of 40"), "{text}");
}

#[test]
fn state_that_lies_elsewhere_is_no_template() {
    let mut moved = host(GENOA);
    *place(&mut moved.leaves, (0x0d, 5, 1)).unwrap() = 1088;
    moved.check(V3).unwrap();
    let text = moved.check(V4).unwrap_err().to_string();
    let expected = "component 5 of the CPU's state has 64 bytes at 1088, not 64 at 832";
    assert!(text.ends_with(expected), "{text}");
}

#[test]
fn flaws_are_the_hosts_own() {
    for (text, given) in GIVEN {
        for template in given {
            let host = host(text);
            let guest = guest(&host, *template);
            for (function, index, at, mask) in OF_HOST {
                let [has, offered] =
                    [&guest, &host.leaves].map(|all| word(all, (function, index, at)));
                assert_eq!(has & mask, offered & mask, "{template}: {function:#x}");
            }
        }
    }
}

#[test]
fn intels_register_of_flaws_is_the_hosts_and_amd_has_none() {
    for (text, value) in [(SAPPHIRE_RAPIDS, 0x0d0f), (GENOA, 0)] {
        let host = Host { arch_capabilities: 0x0d0f, ..host(text) };
        let features = host.cpu(V3, 0, 1).unwrap();
        assert_eq!(host.arch_capabilities(&features), value);
        let whole = host.cpu(Template::Host, 0, 1).unwrap();
        assert_eq!(host.arch_capabilities(&whole), 0x0d0f);
    }
    let text = |host: &Host| {
        let features = host.cpu(V3, 0, 1).unwrap();
        speculation(&features, host.arch_capabilities(&features))
    };
    let [one, mut other] = [SAPPHIRE_RAPIDS; 2].map(host);
    assert_eq!(text(&one), text(&other));
    other.arch_capabilities = 1;
    assert_ne!(text(&one), text(&other));
}

#[test]
fn an_emulated_host_has_no_end_of_interrupts_in_memory() {
    let emulated = Host { is_emulated: true, ..host(EPYC) };
    for template in [Template::Host, V2] {
        assert_eq!(word(&guest(&host(EPYC), template), (0x4000_0001, 0, 0)), 0x0100_7efb);
        assert_eq!(word(&guest(&emulated, template), (0x4000_0001, 0, 0)), 0x0100_7ebb);
    }
}

#[test]
fn each_cpu_has_its_number() {
    for text in [EPYC, BROADWELL] {
        for cpu in 0..4 {
            let leaves = host(text).cpu(V2, cpu, 4).unwrap();
            assert_eq!(word(&leaves, (1, 0, 1)), 0x0004_0800 | cpu << 24);
            assert_eq!(word(&leaves, (0x0b, 0, 3)), cpu);
            assert_eq!(word(&leaves, (0x0b, 1, 1)), 4);
        }
    }
    let zen = guest(&host(EPYC), V2);
    assert_eq!(word(&zen, (0x8000_001e, 0, 0)), 1);
    assert_eq!(word(&zen, (0x8000_0008, 0, 2)), 0x2003);
}

#[test]
fn the_name_is_the_templates() {
    let leaves = guest(&host(BROADWELL), V3);
    let words = (0..3).flat_map(|part| (0..4).map(move |at| (0x8000_0002 + part, 0, at)));
    let name: Vec<u8> = words.flat_map(|at| word(&leaves, at).to_le_bytes()).collect();
    assert_eq!(name.trim_ascii_end(), [b"Slipway x86-64-v3".as_slice(), &[0; 31]].concat());
}
