import os, sys, time, json, math
import torch, triton
import torch.nn.functional as F
sys.path[:0]=["src","tests"]
import regard
from regard.backends import fused
from regard.kernels import configs, launch
from regard.kernels.configs import Config
from regard.problem import pose
dev="cuda"
def bench(f, reps=None):
    return triton.testing.do_bench(f, warmup=30, rep=reps or 100, return_mode="median")
def correctness(part=0, parts=1):
    from contract_cases import CASES
    sys.path.insert(0,"tests/gpu")
    import test_core_on_gpu as T
    bad=0
    for dtype in (torch.float32, torch.bfloat16):
        for c in CASES[part::parts]:
            try:
                tensors, kwargs = c.inputs(dtype)
                on=[T.moved(t,"cuda",dtype) for t in tensors],{k:T.moved(v,"cuda",dtype) for k,v in kwargs.items()}
                dd=[T.moved(t,"cpu",torch.float64) for t in tensors],{k:T.moved(v,"cpu",torch.float64) for k,v in kwargs.items()}
                tol=3e-4 if dtype==torch.float32 else 3e-2
                for at,(x,t) in enumerate(zip(T.found("triton",*on),T.found("reference",*dd),strict=True)):
                    s=max(1.0,float(t.detach().nan_to_num(0,0,0).abs().max())) if t.numel() else 1.0
                    x,t=x.detach().double().cpu(),t.detach().double()
                    e=float(torch.where(x==t,0.0,(x-t).abs()).max() if x.numel() else 0.0)
                    if not e<=tol*s: print("BAD",c.name,dtype,at,e,s,flush=True); bad+=1
            except Exception as ex:
                bad+=1; print("EXC",c.name,dtype,type(ex).__name__,str(ex)[-300:],flush=True)
    print("correctness: bad =",bad,flush=True)
def setup(d,n,causal,tokens=16384,hidden=2048,grad=False):
    b=tokens//n; h=hidden//d
    q,k,v=(torch.randn(b,h,n,d,device=dev,dtype=torch.bfloat16,requires_grad=grad) for _ in range(3))
    fl=4*b*h*n*n*d*(0.5 if causal else 1)
    return q,k,v,fl
def work(q,k,v,mask,obs=True,**kw):
    p=pose(q,k,v,mask=mask,observed=obs,**kw)
    spec,inp=fused._terms(p)
    return fused._work(spec,inp),spec,inp
def sweep_forward(dims, cfgs, ns=(16384,4096)):
    for d in dims:
        for n in ns:
            for causal in (False,True):
                q,k,v,fl=setup(d,n,causal)
                row=[]
                from torch.nn.attention import sdpa_kernel, SDPBackend
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    t=bench(lambda:F.scaled_dot_product_attention(q,k,v,is_causal=causal))
                print(f"d{d} n{n} causal={causal} cuDNN {fl/t/1e9:.0f}",flush=True)
                w,_,_=work(q,k,v,regard.causal() if causal else None)
                for c in cfgs:
                    configs._HOPPER[("forward",2,d)]=c
                    try:
                        a=bench(lambda:launch.attend(w,False)); e=bench(lambda:launch.attend(w,True))
                        print(f"   {tuple(c)} plain {fl/a/1e9:.0f} entropy {fl/e/1e9:.0f}",flush=True)
                    except Exception as ex: print("   ",tuple(c),type(ex).__name__,str(ex)[:100],flush=True)
def sweep_backward(dims, kc, qc, ns=(16384,)):
    for d in dims:
        for n in ns:
            for causal in (False,True):
                q,k,v,fl=setup(d,n,causal)
                fl*=2.5
                w,spec,inp=work(q,k,v,regard.causal() if causal else None)
                f=fused._forward(spec,inp); dO=torch.randn_like(f[0])
                s,_=fused._slopes(w,None,f[:3],(dO,None,None))
                print(f"d{d} n{n} causal={causal} delta {bench(lambda:launch.delta(w,f[0],dO,None))*1e3:.0f}us; total flops/ms target: flex {fl/1e9/ (423 if d==128 else 323):.2f} ms",flush=True)
                for name,cf,fn in (("keys",kc,launch.key_slopes),("queries",qc,launch.query_slopes)):
                    for c in cf:
                        configs._HOPPER[(name,2,d)]=c
                        try:
                            t=bench(lambda:fn(w,s))
                            print(f"   {name} {tuple(c)} {t:.2f} ms",flush=True)
                        except Exception as ex: print("   ",name,tuple(c),type(ex).__name__,str(ex)[:100],flush=True)
if __name__=="__main__":
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)
    for what in sys.argv[1:]:
        t=time.time()
        if what.startswith("correct"): correctness(*map(int,what.split(":")[1:]))
        if what=="fwd": sweep_forward((128,64),[Config(128,128,8,3),Config(128,128,8,2),Config(128,64,8,3),Config(128,64,4,3),Config(128,64,8,4)])
        if what=="bwd": sweep_backward((128,64),[Config(64,128,8,2),Config(64,64,4,2),Config(32,128,8,2),Config(64,128,8,3),Config(128,128,8,2),Config(128,64,8,2)],[Config(128,64,8,2),Config(128,64,8,3),Config(64,64,4,2),Config(128,128,8,2),Config(128,32,8,3)])
        print(what,"took",round(time.time()-t),"s",flush=True)
