import os, sys, time, ctypes
sys.path.insert(0, os.path.dirname(__file__))
import torch, gemini_strategy as gs
from models import SHAPES, build_model, Batches
import gemini_strategy.memory as M
t=time.time()
shape=SHAPES["opt-3.4b"]
dev=torch.device("cuda",0)
model=build_model(shape, torch.device("cpu"), dev, torch.bfloat16)
torch.cuda.empty_cache()
print("build",time.time()-t); t=time.time()
opt=torch.optim.AdamW(model.parameters(),lr=1e-4)
e=gs.manage(model,opt,device_budget="24GB",precision="bf16-true")
print("manage",time.time()-t)
b=Batches(shape,16,1024,1,dev)
pool=e._memory._pool
orig=M.DeviceMemory.tidy
def tidy(self):
    f=torch.cuda.memory_stats()
    before=pool.bytes(); t=time.time(); r=orig(self)
    if r: print("  tidy: held %.2f -> %.2f GB, peak large %.2f current %.3f, took %.3f s"%(before/1e9,pool.bytes()/1e9,f["allocated_bytes.large_pool.peak"]/1e9,f["allocated_bytes.large_pool.current"]/1e9,time.time()-t))
    return r
if os.environ.get("TIDY","1")=="1": M.DeviceMemory.tidy=tidy
else: M.DeviceMemory.tidy=lambda self: False
for s in range(8):
    t0=time.time(); ids=b(s,0)
    loss=model(input_ids=ids,labels=ids).loss
    e.backward(loss, step=True); opt.step(); opt.zero_grad()
    torch.cuda.synchronize()
    st=e.core.stats(); p=e.core.plan_info(); f=torch.cuda.memory_stats()
    fr,tot=torch.cuda.mem_get_info()
    print(s,"%.3f s"%(time.time()-t0),"pool %.2f alloc peak %.2f reserved %.2f used %.2f"%(pool.bytes()/1e9,f["allocated_bytes.all.peak"]/1e9,f["reserved_bytes.all.peak"]/1e9,(tot-fr)/1e9),"outside_peak %.2f dev %.2f"%(st["outside_peak_bytes"]/1e9,st["device_bytes"]/1e9),"plans",st["plans"],"breaks",st["plan_breaks"],"waits",st["replay_waits"], p and (p["n_of_class"],round(p["step_seconds"],3)), flush=True)
try:
    lib=ctypes.CDLL("libnvidia-ml.so.1"); lib.nvmlInit_v2()
    h=ctypes.c_void_p(); lib.nvmlDeviceGetHandleByIndex_v2(0,ctypes.byref(h))
    class P(ctypes.Structure): _fields_=[("pid",ctypes.c_uint),("mem",ctypes.c_ulonglong),("g",ctypes.c_uint),("c",ctypes.c_uint)]
    n=ctypes.c_uint(64); a=(P*64)()
    t=time.time(); rc=lib.nvmlDeviceGetComputeRunningProcesses_v3(h,ctypes.byref(n),a); t=time.time()-t
    fr,tot=torch.cuda.mem_get_info()
    print("nvml rc",rc,"n",n.value,[(a[i].pid,a[i].mem) for i in range(n.value)],"me",os.getpid(),"took",t,"wide",tot-fr)
except Exception as x: print("nvml",x)
